"""as_strided of a vector, as it is recorded (see `ir/strided`): addresses count from the vector's first element.

Reading at addresses and adding at addresses are each other's transposes. A cotangent or a tangent is laid out as a
vector first, for it may come in any strides. PyTorch's own derivative of `as_strided_scatter` is not used: it gives the
gradient of what was overwritten to the whole, and none to the rest. Batching has to know whose memory is addressed: it
stands in `transforms/vmap`.
"""

from __future__ import annotations

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.types import overlaps_itself
from tessera.ops.families import or_zeros
from tessera.ops.op import declare


def _is_vector(eqn: Equation) -> bool:
    x, (*_, offset) = eqn.args[0], eqn.bound()[0]
    return isinstance(x, Value) and x.ndim == 1 and x.tensor.is_row_major and offset in (None, 0)


def _vector(t: Value) -> Value:
    """In memory element after element, whatever a cotangent or a tangent was made by."""
    return t if t.tensor.is_row_major else aten.clone(t, memory_format=torch.contiguous_format)


def _strided_vjp(ct: Value, y: Value, x: Value, size: list, stride: list, offset: Arg) -> Value:
    zeros = aten.new_zeros(ct, list(x.shape))
    if not overlaps_itself(size, stride):
        return aten.as_strided_scatter(zeros, ct, size, stride)
    place = aten.as_strided(aten.arange(x.shape[0], device=ct.tensor.device), size, stride)
    return aten.index_add(zeros, 0, aten.reshape(place, [-1]), aten.reshape(ct, [-1]))


def _strided_scatter_vjp(ct: Value, y: Value, x: Value, part: Value, size: list, stride: list, offset: Arg) -> tuple:
    return (
        lambda: aten.as_strided_scatter(_vector(ct), aten.new_zeros(ct, list(part.shape)), size, stride),
        lambda: aten.as_strided(_vector(ct), size, stride),
    )


declare(
    "aten.as_strided.default",
    "view",
    vjp=lambda ct, y, x, *where: (lambda: _strided_vjp(ct, y, x, *where),),
    jvp=lambda ts, y, x, size, stride, offset: aten.as_strided(_vector(ts[0]), size, stride),
    real=False,
    applies=_is_vector,
    free=True,
)
declare(
    "aten.as_strided_scatter.default",
    "shape",
    vjp=_strided_scatter_vjp,
    jvp=lambda ts, y, x, part, size, stride, offset: aten.as_strided_scatter(
        _vector(or_zeros(ts[0], x)), or_zeros(ts[1], part), size, stride
    ),
    real=False,
    applies=_is_vector,
)
