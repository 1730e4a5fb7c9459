"""Where a view begins in the memory of its argument.

In: an equation. Out: for each result, how many elements behind the start of the argument it begins; nothing where the
equation computes, may copy, or where that depends on more than sizes.
"""

from __future__ import annotations

from itertools import accumulate

from tessera.ir.equation import Equation, Value
from tessera.ir.types import TensorType
from tessera.ir.views import MAY_COPY, PERMUTES, REPEATS, RESHAPES
from tessera.torch_internals.operators import OpOverload
from tessera.util.names import names

WHOLE = RESHAPES | PERMUTES | REPEATS | names("detach alias")  # they begin where their argument does
VIEWS = WHOLE | names("select slice unbind split split_with_sizes chunk")


def has_known_sizes(v: Value) -> bool:
    """A tensor with elements, whose sizes and strides are numbers."""
    return isinstance(v.type, TensorType) and not v.type.is_symbolic and v.numel() > 0


def starts(eqn: Equation) -> list[int]:
    """Of each result that is a view of the only argument."""
    if not isinstance(eqn.op, OpOverload) or eqn.opname not in VIEWS:
        return []
    inputs = eqn.inputs()
    if len(inputs) != 1 or None in eqn.outputs:
        return []
    (x,) = inputs
    if not all(has_known_sizes(v) and v.dtype == x.dtype and v.type.bits == x.type.bits for v in (x, *eqn.results())):  # type: ignore[union-attr]
        return []
    if eqn.opname in WHOLE:
        copies = eqn.opname in MAY_COPY and not (x.tensor.is_row_major and eqn.results()[0].tensor.is_row_major)
        return [] if copies else [0] * len(eqn.outputs)
    (_, *rest), _ = eqn.bound()
    shape, stride = x.tensor.shape, x.tensor.stride
    match eqn.opname, rest:
        case "select", [int(dim), int(index)]:
            return [index % shape[dim] * stride[dim]]  # type: ignore[operator,list-item]
        case "slice", [int(dim), int() | None as start, int() | None, int()]:
            first = start or 0
            first = min(max(first + shape[dim] if first < 0 else first, 0), shape[dim])  # type: ignore[type-var,operator]
            return [first * stride[dim]]  # type: ignore[operator,list-item]
        case "unbind", [int(dim)]:
            return [k * stride[dim] for k in range(len(eqn.outputs))]  # type: ignore[operator,misc]
        case (("split" | "split_with_sizes" | "chunk"), [_, int(dim)]):
            sizes = [v.shape[dim] for v in eqn.results()]
            return [n * stride[dim] for n in accumulate([0, *sizes[:-1]])]  # type: ignore[operator,misc]
    return []
