"""Collectives over a batch whose examples are the ranks along an axis of a mesh.

In: an operand that has all ranks' parts at dimension 0, or one that is the same on all of them; the collective's
arguments behind it. Out: what ranks get, in plain equations, and whether it differs between them. What all ranks get is
one value, so its derivative needs no rule of its own: a gathered value's cotangent is scattered, that of a value that
was the same on all ranks is summed.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera.ir.builder import aten, emit
from tessera.ir.dist import axis_in
from tessera.ir.equation import Arg, Equation, Value
from tessera.ops.families import carry
from tessera.util.errors import RuleError


def along_axis(eqn: Equation, axis: str, size: int, x: Value, varies: bool) -> tuple[Value, bool]:
    """The result of a collective, and whether it differs along this axis."""
    name, args = eqn.op.name, eqn.args[1:]  # type: ignore[union-attr]
    if axis_in(args) != axis:
        return (_inside(eqn, x), True) if varies else (emit(eqn.op, x, *args), False)
    match name, args:
        case "all_reduce", (_, *how):
            return _combined(x, varies, size, str(how[0]) if how else "sum"), False
        case "all_gather", (int(dim), _):
            return _merged(aten.movedim(carry(x, varies, size), 0, dim), dim), False
        case "reduce_scatter", (int(dim), _):
            return _parts(_combined(x, varies, size, "sum"), dim, size), True
        case "all_to_all", (int(split), int(join), _):
            rows = _apart(carry(x, varies, size), split + 1, size)  # [from, …, to, chunk, …]
            rows = aten.movedim(aten.movedim(rows, split + 1, 0), 1, join + 1)  # [to, …, from, joined, …]
            return _merged(rows, join + 1), True
    raise RuleError(f"{eqn.source}: {eqn.op} has no meaning over parts that are stacked")


def _inside(eqn: Equation, x: Value) -> Value:
    """Along another axis: dimensions stand one further."""
    args: Sequence[Arg] = [a + 1 if type(a) is int else a for a in eqn.args[1:]]  # type: ignore[operator]
    return emit(eqn.op, x, *args)


def _combined(x: Value, varies: bool, size: int, how: str) -> Value:
    if not varies:
        return aten.mul(x, size) if how == "sum" else x
    if how == "sum":
        return aten.sum(x, [0], False, dtype=x.dtype)
    return {"max": aten.amax, "min": aten.amin}[how](x, [0])


def _apart(x: Value, dim: int, size: int) -> Value:
    """A dimension as so many chunks."""
    shape = list(x.shape)
    return aten.reshape(x, [*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :]])


def _merged(x: Value, dim: int) -> Value:
    """A dimension and the next one as one."""
    shape = list(x.shape)
    return aten.reshape(x, [*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]])


def _parts(x: Value, dim: int, size: int) -> Value:
    """The chunks of a dimension, stacked."""
    return aten.movedim(_apart(x, dim, size), dim, 0)
