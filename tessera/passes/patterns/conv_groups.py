"""Convolutions of several groups: one batched product, or one convolution for each group where the library knows none.

In: a trace without gradients. Out: the same program, where a convolution of single pixels is a product of matrices for
each group, all in one call, and on Arm one of a few wide groups is the `cat` of convolutions over slices of its image,
its weight and its bias. PyTorch convolves small images group by group, and oneDNN lays them out anew: on a Xeon the
products take a quarter to three quarters of the time. The Arm Compute Library knows no groups but depthwise ones:
others run as a product for each, over a copy of the image as columns, and what they give is copied together. What one
group reads and gives is what it was; only the order of sums is the library's own.
"""

from __future__ import annotations

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import replace_each
from tessera.ir.trace import Trace
from tessera.ir.types import row_major
from tessera.util.names import names

CONVOLUTIONS = names("convolution conv2d")
MOST = 8  # groups: with 32 of them, as many calls cost what they save
NARROWEST = 16  # channels of a group, in and out


def conv_groups(trace: Trace) -> Trace:
    """One convolution for each group, or one product of all groups, where a library runs those faster."""
    trace = replace_each(trace, lambda eqn: eqn.opname in CONVOLUTIONS and _is_product(eqn), _product)
    return replace_each(trace, lambda eqn: eqn.opname in CONVOLUTIONS and _gains(eqn), _apart)


def without_groups() -> bool:
    """Whether the library that convolves here knows no groups."""
    return torch.backends.mkldnn.is_acl_available()


def _groups(eqn: Equation) -> int:
    """How many groups a convolution of known sizes has on a CPU; 1 for any other."""
    if eqn.out.tensor.device.type != "cpu" or eqn.out.dtype != torch.float32:
        return 1
    (x, weight, *rest), _ = eqn.bound()
    assert isinstance(x, Value) and isinstance(weight, Value)
    transposed = eqn.opname == "convolution" and rest[4]
    known = x.ndim == 4 and not x.tensor.is_symbolic and not weight.tensor.is_symbolic
    return rest[-1] if known and not transposed and isinstance(rest[-1], int) else 1


def _gains(eqn: Equation) -> bool:
    """1 x 1 convolutions of several groups are products as they are."""
    weight, groups = eqn.inputs()[1], _groups(eqn) if without_groups() else 1
    wide = min(weight.shape[1], weight.shape[0] // groups) >= NARROWEST  # type: ignore[operator]
    return 1 < groups <= MOST and wide and tuple(weight.shape[2:]) != (1, 1)


def _is_product(eqn: Equation) -> bool:
    """Over single pixels, each of them, in an image that lies channel by channel: nothing has to be copied."""
    (x, weight, _, stride, padding, *_), _ = eqn.bound()
    assert isinstance(x, Value) and isinstance(weight, Value)
    if _groups(eqn) == 1 or tuple(weight.shape[2:]) != (1, 1) or weight.shape[1] == 1:  # depthwise ones it knows
        return False
    plain = all(n == 1 for n in stride) and not isinstance(padding, str) and not any(padding)  # type: ignore[union-attr,arg-type]
    return plain and all(row_major(v.shape, v.tensor.stride) for v in (x, weight))


def _product(eqn: Equation) -> Value:
    """[batch * groups, out, in] times [batch * groups, in, pixels]."""
    (x, weight, bias, *_, groups), _ = eqn.bound()
    assert isinstance(x, Value) and isinstance(weight, Value) and isinstance(groups, int)
    batch, channels, height, width = map(int, x.shape)
    given, read = int(weight.shape[0]) // groups, channels // groups
    matrices = aten.view(weight, [groups, given, read])
    if batch > 1:
        expanded = aten.expand(aten.unsqueeze(matrices, 0), [batch, groups, given, read])
        matrices = aten.reshape(expanded, [batch * groups, given, read])
    out = aten.bmm(matrices, aten.view(x, [batch * groups, read, height * width]))
    out = aten.view(out, [batch, groups * given, height, width])
    return aten.add(out, aten.view(bias, [1, -1, 1, 1])) if isinstance(bias, Value) else out


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
