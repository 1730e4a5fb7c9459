"""Programs over rows that a mask selects, written over all rows.

In: a program that was traced with a number of selected rows, with twice as many, and with none, or one where none
raises. Out: one whose sizes are known: what was `x[mask]` has all rows of x, and in those that the mask leaves out
numbers that nobody reads.

    y = tessera.selected_rows(x, mask)   -->   y = where(mask, x, filling)
    z = aten.linear(y, w)                -->   z = aten.linear(y, w), over all rows
    aten.sum(z)                          -->   aten.sum(where(mask, z, 0))
    aten.mean(z)                         -->   that, by how many rows the mask selects
    aten.cross_entropy_loss(z, labels)   -->   aten.cross_entropy_loss(z, where(mask, labels, ignore_index))

A number in the program that grows with the rows is replaced by their count, which is a value. Where rows meet in
another way, or a program does something else if there are none, it is refused with its line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Equation, Special, Value, values_in
from tessera.ir.rewrite import Rewrite
from tessera.ir.schema import draws, schema_of
from tessera.ir.trace import Trace
from tessera.ops.factors.rule import arguments, tensors
from tessera.ops.families import cast
from tessera.transforms.pipelined.rows import MADE, NONE, How, Rows, aligned, how
from tessera.util.errors import CaptureError
from tessera.util.names import names

LABELLED = names("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d")
ADDED_UP = names("sum mean count_nonzero any mm matmul bmm mv dot")
COUNTED = names("mul div add sub rsub")  # with a number that is how many rows there are


def _never(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    raise AssertionError("selected rows are written over all rows before a program runs")


SELECTED = Special("selected_rows", _never)


@dataclass(frozen=True)
class Mask:
    rows: Value  # which of all rows
    count: Value  # how many of them
    size: int  # the number that stood for that
    every: int  # how many there are in all


def over_all_rows(trace: Trace, twice: Trace, few: Trace, fewest: int) -> Trace:
    """`few` is the program over `fewest` rows, none or one: it shows whether the program asks how many there are."""
    rows = aligned(trace, twice, 2)
    first = next(eqn for eqn in trace.equations if eqn.op is SELECTED)
    if rows is None or [eqn.op for eqn in few.equations] != [eqn.op for eqn in trace.equations]:
        _refuse(first, "the program does something else where more rows, or fewer, are selected")
    for other in (twice, few):
        if not all(map(torch.equal, trace.constants.values(), other.constants.values())):
            _refuse(first, "a tensor of the program is made of how many rows are selected")
    return _OverAllRows(trace, twice, few, rows, fewest).run()


def _refuse(eqn: Equation, why: str) -> NoReturn:
    raise CaptureError(
        f"{eqn.source}: {why}; expected rows that x[mask] selects to be looked at each alone, and then added up, "
        "averaged or counted. Otherwise keep the shape: in place of cross_entropy(x[mask], labels[mask]) write "
        "cross_entropy(x, labels.where(mask, -100)), of x[mask].mean() write x.where(mask, 0).sum() / mask.sum()"
    )


class _OverAllRows:
    def __init__(self, trace: Trace, twice: Trace, few: Trace, rows: Rows, fewest: int) -> None:
        self.rewrite, self.twice, self.few, self.rows, self.fewest = Rewrite(trace), twice, few, rows, fewest
        self.masks: dict[int, Mask] = {}

    def run(self) -> Trace:
        trace = self.rewrite.trace
        for eqn, here, twice, few in zip(
            trace.equations, self.rewrite, self.twice.equations, self.few.equations, strict=True
        ):
            if eqn.op is SELECTED:
                self.enter(eqn, here)
            elif self.rows.has((*eqn.inputs(), *eqn.results())):
                self.equation(eqn, here, twice, few)
            elif any(a != b for other in (twice, few) for a, b in _numbers(eqn, other)):
                self.counted(eqn, here, twice, few)
        self.leave()
        return self.rewrite.finish()

    def leave(self) -> None:
        """What the program gives has no such rows."""
        trace = self.rewrite.trace
        for v in (*values_in(trace.outputs), *trace.mutations.values()):
            if self.rows.dims(v):
                _refuse(self.rewrite.makers[v], "rows that a mask selects are a result of the program")

    def enter(self, eqn: Equation, here: Equation) -> None:
        x, mask = here.args
        assert isinstance(x, Value) and isinstance(mask, Value) and isinstance(size := eqn.out.shape[0], int)
        sizes = [n for n in mask.shape if isinstance(n, int)]
        if len(sizes) < mask.ndim or any(not isinstance(n, int) for n in x.shape):
            _refuse(eqn, "x[mask] of a size that changes")
        every = math.prod(sizes)
        with self.rewrite.at(eqn):
            if size not in self.masks:
                flat = aten.reshape(mask, [every])
                self.masks[size] = Mask(flat, aten.sum(flat), size, every)
            x = aten.reshape(x, [every, *x.shape[mask.ndim :]])
            self.rewrite.rename(eqn.out, aten.where(self.along(self.masks[size], x, 0), x, _filling(x)))

    # --- rows ---

    def mask_of(self, eqn: Equation) -> Mask:
        sizes = {v.shape[d] for v in (*eqn.inputs(), *eqn.results()) for d in self.rows.dims(v)}
        masks = {self.masks.get(n) for n in sizes}  # type: ignore[arg-type]
        if len(masks) > 1 or None in masks:
            _refuse(eqn, f"{eqn.op} joins rows of a mask with other dimensions")
        return masks.pop()  # type: ignore[return-value]

    def along(self, mask: Mask, v: Value, dim: int) -> Value:
        """The mask as one may read it beside a value."""
        return aten.reshape(mask.rows, [mask.every if d == dim else 1 for d in range(v.ndim)])

    def kept(self, mask: Mask, v: Value, dim: int, other: float) -> Value:
        """A value that holds something else in rows that were left out."""
        return aten.where(self.along(mask, v, dim), v, aten.full_like(v, other))

    def equation(self, eqn: Equation, here: Equation, twice: Equation, few: Equation) -> None:
        mask, given = self.mask_of(eqn), self.rows.has(eqn.inputs())
        if any(isinstance(a, Trace) for a in eqn.args):
            _refuse(eqn, f"{eqn.op} runs a function on rows of a mask")
        for (number, two), (_, less) in zip(_numbers(eqn, twice), _numbers(eqn, few), strict=True):
            if less != (number if number == two else self.fewest):
                self.refuse_number(eqn)
        made = eqn.opname in MADE
        if not given and not made and eqn.opname != "expand" and not draws(eqn.op, eqn.args, eqn.kwargs):
            _refuse(eqn, f"{eqn.op} makes as many as a mask selects")
        way = how(eqn, twice, self.rows) if given and not made else How.APART
        with self.rewrite.at(eqn):
            if way == How.APART:
                out = self.apart(eqn, here, twice, mask)
            elif way == How.TOGETHER:
                _refuse(eqn, f"{eqn.op} looks at rows of a mask together")
            elif isinstance(arguments(eqn).get("reduction"), int):
                out = self.loss(eqn, here, mask, way)
            elif eqn.opname in ADDED_UP:
                out = self.added_up(eqn, here, mask)
            else:
                _refuse(eqn, f"{eqn.op} adds up rows of a mask")
        listed = out if isinstance(out, (list, tuple)) else [out]
        for old, new in zip(eqn.outputs, listed, strict=True):
            if old is not None:
                self.rewrite.rename(old, new)

    def apart(self, eqn: Equation, here: Equation, twice: Equation, mask: Mask) -> Any:
        def resized(now: Arg, mine: Arg, theirs: Arg) -> Arg:
            if isinstance(now, (list, tuple)):
                return [resized(*each) for each in zip(now, mine, theirs, strict=True)]  # type: ignore[arg-type]
            if isinstance(mine, (Value, Trace)) or mine is None or mine == theirs:
                return now
            if mine != mask.size:
                self.refuse_number(eqn)
            return mask.every if eqn.opname not in COUNTED else cast(mask.count, eqn.out.dtype)

        args = [resized(*each) for each in zip(here.args, eqn.args, twice.args, strict=True)]
        kwargs = {name: resized(a, eqn.kwargs[name], twice.kwargs[name]) for name, a in here.kwargs.items()}
        return self.rewrite.builder.emit(eqn.op, *args, **kwargs)

    def added_up(self, eqn: Equation, here: Equation, mask: Mask) -> Any:
        zeros = {
            now: self.kept(mask, now, dim, 0)
            for v, now in zip(tensors(eqn), tensors(here), strict=True) for dim in self.rows.dims(v)
        }  # fmt: skip
        out = self.rewrite.builder.emit(eqn.op, *here.substitute(zeros).args, **here.kwargs)
        return self.shared(out, mask) if eqn.opname == "mean" else out

    def shared(self, mean: Any, mask: Mask) -> Value:
        """A mean over all rows, over those that count."""
        return aten.div(aten.mul(mean, mask.every), cast(mask.count, mean.dtype))

    def loss(self, eqn: Equation, here: Equation, mask: Mask, way: How) -> Any:
        given = arguments(here)
        if eqn.opname in LABELLED and not (target := given["target"]).tensor.is_float:
            places = {target: self.kept(mask, target, 0, given["ignore_index"])}
            return self.rewrite.builder.emit(eqn.op, *here.substitute(places).args, **here.kwargs)
        if eqn.many or any(self.rows.dims(v) != [0] for v in tensors(eqn) if self.rows.dims(v)):
            _refuse(eqn, f"{eqn.op} averages rows of a mask")
        each: Any = self.rewrite.builder.emit(eqn.op, *_without_reduction(here), **here.bound()[1])
        out = aten.sum(self.kept(mask, each, 0, 0))
        size = math.prod(each.shape[1:])
        return aten.div(out, aten.mul(cast(mask.count, out.dtype), size)) if way == How.MEAN else out

    # --- numbers ---

    def counted(self, eqn: Equation, here: Equation, twice: Equation, few: Equation) -> None:
        """A quotient by how many rows there are, times another number."""
        places = [i for i, (a, b) in enumerate(zip(eqn.args, twice.args, strict=True)) if _number(a, b) and a != b]
        if eqn.opname not in COUNTED or len(places) != 1:
            self.refuse_number(eqn)
        (place,) = places
        number: Any = eqn.args[place]
        mask = next((m for size, m in self.masks.items() if number % size == 0), None)
        if mask is None or twice.args[place] != 2 * number:
            self.refuse_number(eqn)
        # `max(len(rows), 1)` is another number where there are none
        least: Any = few.args[place] if self.fewest == 0 else 0
        if least not in (0, 1) or few.args[place] != max(number // mask.size * self.fewest, least):
            self.refuse_number(eqn)
        with self.rewrite.at(eqn):
            count = aten.clamp_min(aten.mul(mask.count, number // mask.size), least)
            args = [cast(count, eqn.out.dtype) if i == place else a for i, a in enumerate(here.args)]
            self.rewrite.rename(eqn.out, getattr(aten, eqn.opname)(*args, **here.kwargs))

    def refuse_number(self, eqn: Equation) -> NoReturn:
        _refuse(eqn, f"{eqn.op} of a number that depends on how many rows a mask selects")


def _without_reduction(eqn: Equation) -> list[Arg]:
    """The arguments of a loss that gives each element's."""
    params = schema_of(eqn.op).positional
    return [NONE if param.name == "reduction" else a for param, a in zip(params, eqn.bound()[0], strict=True)]


def _filling(x: Value) -> Value:
    """Numbers that functions like to be given, other ones in each place of a row."""
    if not (x.tensor.is_float or x.dtype.is_complex):
        return aten.zeros_like(x)
    size = math.prod(x.shape[1:])
    row = aten.linspace(0.3, 0.7, size, dtype=torch.float32, device=x.tensor.device)
    return aten.expand(cast(aten.reshape(row, [1, *x.shape[1:]]), x.dtype), list(x.shape))


def _number(a: object, b: object) -> bool:
    return isinstance(a, (int, float)) and isinstance(b, (int, float))


def _numbers(eqn: Equation, other: Equation) -> Iterator[tuple]:
    yield from ((a, b) for a, b in zip(eqn.args, other.args, strict=True) if _number(a, b))
    yield from ((a, other.kwargs[n]) for n, a in eqn.kwargs.items() if _number(a, other.kwargs[n]))
