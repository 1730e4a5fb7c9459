"""What a mask says of places, told from the equations that make it.

In: a boolean value whose makers compare positions: `arange`, shifted, viewed, looked up, compared, joined by "and".
Out: the conditions under which it is true, each `constant + Σ step · index >= 0` over the dimensions of the value.
Sizes may be symbols; nothing is computed. Libraries that pack several texts into a row count where positions do not go
up by one: of positions that do, it is told that there is one text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.types import Size, TensorType, settled, size_key
from tessera.util.names import names

SAME = names("detach alias clone contiguous lift_fresh_copy")
AND = names("bitwise_and logical_and")
COMPARED: dict[str, tuple[int, int]] = {"ge": (1, 0), "gt": (1, -1), "le": (-1, 0), "lt": (-1, -1)}  # sign, shift


@dataclass(frozen=True)
class Affine:
    """A whole number at every index: a constant, and a step for each dimension."""

    constant: int
    steps: tuple[int, ...]

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        steps = tuple(a + factor * b for a, b in zip(self.steps, other.steps, strict=True))
        return Affine(self.constant + factor * other.constant, steps)

    def never_negative(self, shape: tuple[Size, ...]) -> bool:
        """At least zero at every index of a tensor of this shape."""
        least: Size = self.constant
        for step, size in zip(self.steps, shape, strict=True):
            least = least + (step * (size - 1) if step < 0 else 0)
        return settled(least >= 0) is True


Places = Affine | frozenset[Affine]


def conditions(mask: Value, makers: dict[Value, Equation]) -> frozenset[Affine] | None:
    """When a mask is true, without what always holds; None where its makers do not say."""
    places = _places(mask, makers)
    if not isinstance(places, frozenset):
        return None
    return frozenset(c for c in places if not c.never_negative(mask.tensor.shape))


def _places(v: Arg, makers: dict[Value, Equation]) -> Places | None:
    eqn = makers.get(v) if isinstance(v, Value) else None
    if eqn is None or len(eqn.outputs) != 1 or not isinstance(eqn.out.type, TensorType):
        return None
    if eqn.opname in COMPARED:
        return _compared(eqn, makers)
    if eqn.opname in ("eq", "ne"):
        return _equal(eqn, makers)
    if eqn.opname in AND:
        pair = [_lifted(a, eqn.out, makers) for a in eqn.args[:2]]
        return pair[0] | pair[1] if all(isinstance(p, frozenset) for p in pair) else None  # type: ignore[operator]
    if eqn.opname == "arange":
        return _positions(eqn)
    if eqn.opname in ("ones", "new_ones", "full", "new_full"):
        filled = True if "ones" in eqn.opname else eqn.bound()[0][-1]
        return frozenset() if eqn.out.dtype is torch.bool and filled in (True, 1) else None
    if eqn.opname in ("add", "sub"):
        return _shifted(eqn, makers)
    rule = LOOKED_UP.get(eqn.opname)
    return rule(eqn, makers) if rule is not None else _viewed(eqn, makers)


def _positions(eqn: Equation) -> Affine | None:
    given = eqn.bound()[0]
    start, step = {1: (0, 1), 2: (given[0], 1), 3: (given[0], given[-1])}.get(len(given), (None, None))
    whole = eqn.out.dtype in (torch.int64, torch.int32)
    return Affine(start, (step,)) if whole and type(start) is int and type(step) is int else None


def _shifted(eqn: Equation, makers: dict[Value, Equation]) -> Affine | None:
    pair = [_lifted(a, eqn.out, makers) for a in eqn.args[:2]]
    whole = eqn.out.dtype in (torch.int64, torch.int32) and eqn.bound()[1].get("alpha", 1) == 1
    if not whole or not isinstance(pair[0], Affine) or not isinstance(pair[1], Affine):
        return None
    return pair[0].plus(pair[1], 1 if eqn.opname == "add" else -1)


def _equal(eqn: Equation, makers: dict[Value, Equation]) -> frozenset[Affine] | None:
    """Where two numbers are as far apart at every index: always or never."""
    left, right = (_lifted(a, eqn.out, makers) for a in eqn.args[:2])
    if not isinstance(left, Affine) or not isinstance(right, Affine):
        return None
    difference = left.plus(right, -1)
    if any(difference.steps):
        return None
    always = (difference.constant == 0) is (eqn.opname == "eq")
    return frozenset() if always else frozenset((Affine(-1, difference.steps),))


def _compared(eqn: Equation, makers: dict[Value, Equation]) -> frozenset[Affine] | None:
    left, right = (_lifted(a, eqn.out, makers) for a in eqn.args[:2])
    if not isinstance(left, Affine) or not isinstance(right, Affine):
        return None
    sign, shift = COMPARED[eqn.opname]
    difference = left.plus(right, -1)
    scaled = Affine(sign * difference.constant + shift, tuple(sign * s for s in difference.steps))
    return frozenset((scaled,))


def _lifted(a: Arg, to: Value, makers: dict[Value, Equation]) -> Places | None:
    """An operand over the dimensions of the result that it is broadcast to."""
    rank = to.ndim
    if type(a) is int:
        return Affine(a, (0,) * rank)
    places = _places(a, makers)
    if places is None or not isinstance(a, Value):
        return None
    return _over(places, lambda steps: _broadcast(steps, a.tensor.shape, rank))


def _broadcast(steps: tuple[int, ...], shape: tuple[Size, ...], rank: int) -> tuple[int, ...]:
    own = (0 if size_key(size) == 1 else step for step, size in zip(steps, shape, strict=True))
    return (0,) * (rank - len(steps)) + tuple(own)


def _viewed(eqn: Equation, makers: dict[Value, Equation]) -> Places | None:
    """The same numbers in other dimensions."""
    args = eqn.bound()[0]
    places = _places(args[0], makers) if args else None
    if places is None:
        return None
    source = args[0].tensor  # type: ignore[union-attr]
    rank = source.ndim
    match eqn.opname:
        case name if name in SAME:
            return places
        case "_to_copy":
            return places if eqn.out.dtype == source.dtype else None
        case "unsqueeze":
            at = args[1] % (rank + 1)  # type: ignore[operator]
            return _over(places, lambda steps: (*steps[:at], 0, *steps[at:]))
        case "expand":
            return _over(places, lambda steps: _broadcast(steps, source.shape, eqn.out.ndim))
        case "transpose" | "permute":
            order = list(range(rank))
            if eqn.opname == "permute":
                order = [d % rank for d in args[1]]  # type: ignore[union-attr, operator]
            else:
                a, b = (d % rank for d in args[1:3])  # type: ignore[operator]
                order[a], order[b] = order[b], order[a]
            return _over(places, lambda steps: tuple(steps[d] for d in order))
    return None


# --- parts, and what is put together ---


def _part(eqn: Equation, makers: dict[Value, Equation]) -> Places | None:
    """From a place on, and every so many."""
    x, dim, start, _, step = (*eqn.bound()[0], *(None,) * 4)[:5]
    dim, start = dim or 0, start or 0
    step = 1 if step is None or eqn.opname == "narrow" else step
    places = _places(x, makers)
    if places is None or type(start) is not int or start < 0 or type(step) is not int or type(dim) is not int:
        return None
    at = dim % eqn.out.ndim

    def part(c: Affine) -> Affine:
        steps = (*c.steps[:at], c.steps[at] * step, *c.steps[at + 1 :])
        return Affine(c.constant + c.steps[at] * start, steps)

    return part(places) if isinstance(places, Affine) else frozenset(map(part, places))


def _joined(eqn: Equation, makers: dict[Value, Equation]) -> Affine | None:
    """Pieces that go on where the one before ends."""
    pieces, *dim = eqn.bound()[0]
    assert isinstance(pieces, (list, tuple))
    at = (dim[0] if dim and type(dim[0]) is int else 0) % eqn.out.ndim  # type: ignore[operator]
    found = [(x, _places(x, makers)) for x in pieces]
    starts: list[int] = [0]
    for x in pieces[:-1]:
        size = x.shape[at] if isinstance(x, Value) and x.ndim == eqn.out.ndim else None
        if type(size) is not int:
            return None
        starts.append(starts[-1] + size)
    last = found[-1][1]
    if not isinstance(last, Affine) or size_key(pieces[-1].shape[at]) == 1:  # type: ignore[union-attr]
        return None
    whole = Affine(last.constant - last.steps[at] * starts[-1], last.steps)
    for (x, places), start in zip(found[:-1], starts, strict=False):
        if not isinstance(places, Affine) or places.constant != whole.constant + whole.steps[at] * start:
            return None
        steps = zip(places.steps, whole.steps, x.tensor.shape, strict=True)  # type: ignore[union-attr]
        if any(own != other and size_key(size) != 1 for own, other, size in steps):
            return None
    return whole


def _counted(eqn: Equation, makers: dict[Value, Equation]) -> Affine | None:
    """A running count of what never is."""
    places = _places(eqn.args[0], makers)
    if not isinstance(places, frozenset) or eqn.out.dtype not in (torch.int64, torch.int32):
        return None
    never = any(c.constant < 0 and not any(c.steps) for c in places)
    return Affine(0, (0,) * eqn.out.ndim) if never else None


def _looked_up(eqn: Equation, makers: dict[Value, Equation]) -> Affine | None:
    """A number for each dimension says where; from the end on, where it is negative."""
    table, indices = eqn.args[:2]
    places = _places(table, makers)
    assert isinstance(indices, (list, tuple)) and isinstance(table, Value)
    if not isinstance(places, Affine) or len(indices) != table.ndim:
        return None
    found = Affine(places.constant, (0,) * eqn.out.ndim)
    for index, step in zip(indices, places.steps, strict=True):
        at = _lifted(index, eqn.out, makers)
        if not isinstance(at, Affine) or not at.never_negative(eqn.out.tensor.shape):
            return None
        found = found.plus(at, step)
    return found


LOOKED_UP = {"slice": _part, "narrow": _part, "cat": _joined, "cumsum": _counted, "index": _looked_up}


def _over(places: Places, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Places:
    if isinstance(places, Affine):
        return Affine(places.constant, change(places.steps))
    return frozenset(Affine(c.constant, change(c.steps)) for c in places)
