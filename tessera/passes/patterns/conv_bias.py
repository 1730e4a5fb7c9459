"""The bias of a convolution on a GPU as a sum of its own.

In: a trace. Out: the same program, where `conv2d(x, w, b)` is `conv2d(x, w) + b`. PyTorch computes it so on a GPU: it
writes the convolution, reads it and writes it again; and the gradient by the bias is a reduction of its library's. A
sum in the trace is part of the kernel that reads it, and so is its gradient. The rounding is the same. Depthwise
convolutions add theirs themselves.
"""

from __future__ import annotations

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import replace_each
from tessera.ir.trace import Trace
from tessera.util.names import names

CONVOLUTIONS = names("convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
DEVICES = ("cuda",)


def conv_bias(trace: Trace) -> Trace:
    """Convolutions without a bias, and their biases added."""
    return replace_each(trace, lambda eqn: eqn.opname in CONVOLUTIONS and _has_own_sum(eqn), _apart)


def _has_own_sum(eqn: Equation) -> bool:
    (x, weight, bias, *_), _ = eqn.bound()
    assert isinstance(x, Value) and isinstance(weight, Value)
    if not isinstance(bias, Value) or eqn.out.tensor.device.type not in DEVICES or bias.dtype != eqn.out.dtype:
        return False
    return weight.shape[1] != 1 or x.shape[x.ndim - weight.ndim + 1] == 1


def _apart(eqn: Equation) -> Value:
    (x, weight, bias, *rest), keyword = eqn.bound()
    assert isinstance(weight, Value) and isinstance(bias, Value)
    y = emit(eqn.op, x, weight, None, *rest, **keyword)
    return aten.add(y, aten.view(bias, [-1, *[1] * (weight.ndim - 2)]))
