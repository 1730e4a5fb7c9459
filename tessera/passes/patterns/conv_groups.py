"""Convolutions of a few wide groups as one convolution for each group.

In: a trace without gradients. Out: the same program, where such a convolution is the `cat` of convolutions over slices
of its image, its weight and its bias. The Arm Compute Library, which PyTorch convolves with on Arm, knows no groups but
depthwise ones: others run as a product for each, over a copy of the image as columns. What one group reads and gives
is what it was; only the order of sums is the library's own.
"""

from __future__ import annotations

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import replace_each
from tessera.ir.trace import Trace
from tessera.util.names import names

CONVOLUTIONS = names("convolution conv2d")
MOST = 8  # groups: with 32 of them, as many calls cost what they save
NARROWEST = 16  # channels of a group, in and out


def conv_groups(trace: Trace) -> Trace:
    """One convolution for each group, where a library runs those faster."""
    return replace_each(trace, lambda eqn: eqn.opname in CONVOLUTIONS and _gains(eqn), _apart)


def without_groups() -> bool:
    """Whether the library that convolves here knows no groups."""
    return torch.backends.mkldnn.is_acl_available()


def _gains(eqn: Equation) -> bool:
    """1 x 1 convolutions of several groups are products as they are."""
    if not without_groups() or eqn.out.tensor.device.type != "cpu" or eqn.out.dtype != torch.float32:
        return False
    (x, weight, *rest), _ = eqn.bound()
    assert isinstance(x, Value) and isinstance(weight, Value)
    groups = rest[-1]
    if x.ndim != 4 or x.tensor.is_symbolic or weight.tensor.is_symbolic or not isinstance(groups, int):
        return False
    wide = min(weight.shape[1], weight.shape[0] // groups) >= NARROWEST  # type: ignore[operator]
    transposed = eqn.opname == "convolution" and rest[4]
    return 1 < groups <= MOST and wide and tuple(weight.shape[2:]) != (1, 1) and not transposed


def _apart(eqn: Equation) -> Value:
    (x, weight, bias, *rest, groups), keyword = eqn.bound()
    assert isinstance(x, Value) and isinstance(weight, Value) and isinstance(groups, int)

    def part(v: Value, dim: int, i: int) -> Value:
        size = int(v.shape[dim]) // groups
        return aten.slice(v, dim, i * size, (i + 1) * size)

    def group(i: int) -> Value:
        own = part(bias, 0, i) if isinstance(bias, Value) else None
        return emit(eqn.op, part(x, 1, i), part(weight, 0, i), own, *rest, 1, **keyword)

    return aten.cat([group(i) for i in range(groups)], 1)
