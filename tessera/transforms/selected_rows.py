"""Programs over rows that a mask selects, written over all rows.

In: a program that was traced with a number of selected rows, with twice as many, and with none, or one where none
raises. Out: one whose sizes are known: what was `x[mask]` has all rows of x, and in those that the mask leaves out
numbers that nobody reads.

    y = tessera.selected_rows(x, mask)   -->   y = where(mask, x, filling)
    z = aten.linear(y, w)                -->   z = aten.linear(y, w), over all rows
    aten.sum(z)                          -->   aten.sum(where(mask, z, 0)), and so on (`selected_sums.py`)
    aten.cross_entropy_loss(z, labels)   -->   aten.cross_entropy_loss(z, where(mask, labels, ignore_index))
    aten.cat([z, other])                 -->   aten.cat([z, other]), and of their masks (`selected_masks.py`)
    tessera.spread_rows(x, mask, z)      -->   where(mask, z, x): x with x[mask] = z

A number in the program that grows with the rows is replaced by their count, which is a value. Where rows meet in
another"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Equation, Special, Value, substitute, values_in
from tessera.ir.rewrite import Rewrite
from tessera.ir.schema import draws, schema_of
from tessera.ir.trace import Trace
from tessera.ir.views import RESHAPES
from tessera.ops.factors.rule import arguments, tensors
from tessera.ops.families import cast
from tessera.transforms.pipelined.rows import MADE, NONE, How, Rows, aligned, how
from tessera.transforms.selected_masks import Mask, Masks
from tessera.transforms.selected_order import ORDERS, in_order, picked, picks
from tessera.transforms.selected_sums import along, kept, together
from tessera.util.errors import CaptureError
from tessera.util.names import names

LABELLED = names("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d")
COUNTED = names("mul div add sub rsub")  # with a number that is how many rows there are


def _never(*_: object) -> torch.Tensor:
    raise AssertionError("selected rows are written over all rows before a program runs")


SELECTED = Special("selected_rows", _never)
SPREAD = Special("spread_rows", _never)  # x where rows that a mask selects are replaced; then the number of them


@dataclass(frozen=True)
class Chosen:
    """A result of the program that is some rows of what it gives. Rows that a mask over the batch selects lie as the
    mask does, so that a rank has its own. Others are `alone`: a dimension before all others makes them lie whole."""

    mask: int  # the output that says which
    dim: int
    alone: bool

    def of(self, x: Tensor, mask: Tensor) -> Tensor:
        x, mask = x[0] if self.alone else x, mask[0] if self.alone or self.dim else mask
        return x[(*(slice(None) for _ in range(self.dim)), mask)]


def over_all_rows(trace: Trace, twice: Trace, few: Trace, fewest: int, results: int) -> tuple[Trace, dict[int, Chosen]]:
    """`few` is the program over `fewest` rows, none if it can be: it shows whether the program asks how many there are.
    Among its first `results` outputs are such rows: masks stand behind these, and which are such is told."""
    rows = aligned(trace, twice, 2, lambda size, longer: size <= longer)
    first = next(eqn for eqn in trace.equations if eqn.op is SELECTED)
    if rows is None or [eqn.op for eqn in few.equations] != [eqn.op for eqn in trace.equations]:
        _refuse(first, "the program does something else where more rows, or fewer, are selected")
    for other in (twice, few):
        if not all(map(torch.equal, trace.constants.values(), other.constants.values())):
            _refuse(first, "a tensor of the program is made of how many rows are selected")
    over = _OverAllRows(trace, twice, few, rows, fewest)
    return over.run(results), over.chosen


def _refuse(eqn: Equation, why: str) -> NoReturn:
    raise CaptureError(
        f"{eqn.source}: {why}; expected rows that x[mask] selects to be looked at each alone, and then added up, "
        "averaged or counted. Otherwise keep the shape: in place of cross_entropy(x[mask], labels[mask]) write "
        "cross_entropy(x, labels.where(mask, -100)), of x[mask].mean() write x.where(mask, 0).sum() / mask.sum()"
    )


class _OverAllRows:
    def __init__(self, trace: Trace, twice: Trace, few: Trace, rows: Rows, fewest: int) -> None:
        self.rewrite, self.twice, self.few, self.rows = Rewrite(trace), twice, few, rows
        self.masks = Masks(fewest)
        self.of: dict[Value, Mask] = {}  # of the old program's values, which rows they have
        self.chosen: dict[int, Chosen] = {}

    def run(self, results: int) -> Trace:
        trace = self.rewrite.trace
        for eqn, here, twice, few in zip(
            trace.equations, self.rewrite, self.twice.equations, self.few.equations, strict=True
        ):
            if eqn.op is SELECTED:
                self.enter(eqn, here)
            elif eqn.op is SPREAD:
                self.spread(eqn, here)
            elif self.rows.has((*eqn.inputs(), *eqn.results())):
                self.equation(eqn, here, twice, few)
            elif any(a != b for other in (twice, few) for a, b in _numbers(eqn, other)):
                self.counted(eqn, here, twice, few)
        outputs = self.leave(results)
        return self.rewrite.finish(outputs=tuple(outputs))

    def leave(self, results: int) -> list[Arg]:
        """What the program gives, and behind its results the masks of those that are rows."""
        trace, makers = self.rewrite.trace, self.rewrite.makers
        others = zip(trace.outputs, self.twice.outputs, strict=True)
        if any(a != b for a, b in others if not isinstance(a, Value)):
            _refuse(next(e for e in trace.equations if e.op is SELECTED), "how many rows there are is a result")
        for v in (*values_in(trace.outputs[results:]), *trace.mutations.values()):
            if self.rows.dims(v):
                _refuse(makers[v], "rows that a mask selects are kept in a buffer, or stand where a plan names them")
        given, masks = [*substitute(trace.outputs, self.rewrite.renamed)], list[Arg]()
        for i, v in enumerate(trace.outputs[:results]):
            if isinstance(v, Value) and self.rows.dims(v):
                with self.rewrite.at(makers[v]):
                    given[i], mask, dim, alone = self.result_rows(v)
                self.chosen[i] = Chosen(results + len(masks), dim, alone)
                masks.append(mask)
        return [*given[:results], *masks, *given[results:]]

    def result_rows(self, v: Value) -> tuple[Value, Value, int, bool]:
        """As long as all rows, in the form of the mask that selects them; and the mask."""
        mask, new, dim = self.of[v], self.rewrite.renamed.get(v, v), self.dim_of(v)
        if dim is None:
            _refuse(self.rewrite.makers[v], "a result has several dimensions of rows that masks select")
        alone = not mask.shape
        shape = mask.shape or (mask.every,)
        x = aten.reshape(new, [*([1] if alone else []), *new.shape[:dim], *shape, *new.shape[dim + 1 :]])
        return x, aten.reshape(mask.rows, [*([1] if alone or dim else []), *shape]), dim, alone

    def enter(self, eqn: Equation, here: Equation) -> None:
        x, mask = here.args
        assert isinstance(x, Value) and isinstance(mask, Value) and isinstance(size := eqn.out.shape[0], int)
        if any(not isinstance(n, int) for n in (*mask.shape, *x.shape)):
            _refuse(eqn, "x[mask] of a size that changes")
        every = math.prod(int(n) for n in mask.shape)
        with self.rewrite.at(eqn):
            if size not in self.masks.selected:
                self.masks.select(size, aten.reshape(self.among(eqn, mask), [every]), self.shape(eqn, mask))
            chosen = self.masks.selected[size]
            x = aten.reshape(x, [every, *x.shape[mask.ndim :]])
            self.rewrite.rename(eqn.out, aten.where(along(chosen, x, 0), x, _filling(x)))
        self.of[eqn.out] = chosen

    def among(self, eqn: Equation, mask: Value) -> Value:
        """A mask over rows that another one selected says nothing of those that it left out."""
        x, old = eqn.args
        assert isinstance(x, Value) and isinstance(old, Value)
        if not self.rows.dims(x) and not self.rows.dims(old):
            return mask
        if self.rows.dims(x) != self.rows.dims(old) or self.of[x] is not self.of[old]:
            _refuse(eqn, "x[mask] of rows that another mask selects")
        return kept(self.of[x], mask, self.rows.dims(x)[0], 0)

    def shape(self, eqn: Equation, mask: Value) -> tuple[int, ...]:
        x = eqn.args[0]
        assert isinstance(x, Value)
        return self.of[x].shape if self.rows.dims(x) else tuple(int(n) for n in mask.shape)

    def spread(self, eqn: Equation, here: Equation) -> None:
        """Rows go back where the mask took them from."""
        x, mask, rows, _ = here.args
        _, _, old, size = eqn.args
        assert isinstance(x, Value) and isinstance(mask, Value) and isinstance(rows, Value)
        assert isinstance(old, Value) and isinstance(size, int)
        if self.rows.dims(old) and (self.rows.dims(old) != [0] or self.of[old] is not self.masks.selected.get(size)):
            _refuse(eqn, "rows that one mask selects are written where another one says")
        if not self.rows.dims(old) and old.shape[0] != 1:
            _refuse(eqn, "rows of another number are written where a mask says")
        with self.rewrite.at(eqn):
            there = aten.reshape(mask, [*mask.shape, *(1 for _ in x.shape[mask.ndim :])])
            first = mask.shape if self.rows.dims(old) else [1] * mask.ndim
            self.rewrite.rename(eqn.out, aten.where(there, aten.reshape(rows, [*first, *rows.shape[1:]]), x))
        if self.rows.dims(eqn.out):
            (given,) = {self.of[v] for v in eqn.inputs() if self.rows.dims(v) and v is not old}
            self.of[eqn.out] = given

    # --- rows ---

    def mask_of(self, eqn: Equation) -> Mask:
        given = {self.of[v] for v in eqn.inputs() if self.rows.dims(v)}
        if not given:
            made = {self.masks.of_size(v.shape[d]) for v in eqn.results() for d in self.rows.dims(v)}
            given = {mask for mask in made if mask is not None} if None not in made else set()
        if len(given) != 1:
            _refuse(eqn, f"{eqn.op} joins rows of a mask with other dimensions")
        return given.pop()

    def equation(self, eqn: Equation, here: Equation, twice: Equation, few: Equation) -> None:
        if any(isinstance(a, Trace) for a in eqn.args):
            _refuse(eqn, f"{eqn.op} runs a function on rows of a mask")
        out: Any
        with self.rewrite.at(eqn):
            after = self.behind(eqn) if eqn.opname == "cat" else None
            if after is not None:
                masks, out = (after, after), self.rewrite.builder.emit(eqn.op, *here.args, **here.kwargs)
            elif self.picks(eqn):
                masks, out = self.picked(eqn, here)
            else:
                mask = self.mask_of(eqn)
                masks = mask, self.reshaped(eqn, mask)
                out = self.result(eqn, here, twice, few, masks)
                if eqn.opname == "sort" and how(eqn, twice, self.rows) == How.TOGETHER:
                    masks = mask, self.masks.ordered(mask)
        listed = out if isinstance(out, (list, tuple)) else [out]
        for old, new in zip(eqn.outputs, listed, strict=True):
            if old is not None:
                if any(old.shape[d] != masks[1].size for d in self.rows.dims(old)) or new is None:
                    _refuse(eqn, f"{eqn.op} joins rows of a mask with other dimensions")
                self.of[old] = masks[1]
                self.rewrite.rename(old, new)

    def dim_of(self, v: Value) -> int | None:
        """The dimension of rows, of which there is one."""
        dims = self.rows.dims(v)
        return dims[0] if len(dims) == 1 else None

    def picks(self, eqn: Equation) -> bool:
        dim = self.dim_of(tensors(eqn)[0]) if tensors(eqn) else None
        return dim is not None and picks(eqn, dim)

    def picked(self, eqn: Equation, here: Equation) -> tuple[tuple[Mask, Mask], Any]:
        x, places = tensors(eqn)[:2]
        mask, dim = self.of[x], self.dim_of(places)
        if dim is None and self.rows.dims(places):
            _refuse(eqn, f"{eqn.op} joins rows of a mask with other dimensions")
        chosen = None if dim is None else self.of[places]
        there = None if chosen is None else along(chosen, places, dim)  # type: ignore[arg-type]
        maker = self.rewrite.makers.get(places)
        sure = maker is not None and maker.opname in ORDERS and self.of.get(tensors(maker)[0]) is mask
        return (mask, chosen or mask), picked(self.rewrite, eqn, here, mask, there, sure)

    def behind(self, eqn: Equation) -> Mask | None:
        """The rows of what is joined along rows."""
        parts = tensors(eqn)
        (dim,) = self.rows.dims(eqn.out)[:1] or [None]
        if dim is None or dim != arguments(eqn).get("dim", 0) % eqn.out.ndim:
            return None
        sizes = [self.of[v] if self.rows.dims(v) else v.shape[dim] for v in parts]
        if not all(isinstance(n, (Mask, int)) for n in sizes):
            return None
        return self.masks.joined(sizes)  # type: ignore[arg-type]

    def reshaped(self, eqn: Equation, mask: Mask) -> Mask:
        """The rows of what shows rows in another shape, in their order."""
        if eqn.opname not in RESHAPES or not self.rows.dims(x := tensors(eqn)[0]):
            return mask
        out = eqn.out
        (dim,), there = self.rows.dims(x), self.rows.dims(out)
        if len(there) != 1 or math.prod(x.shape[:dim]) != math.prod(out.shape[: there[0]]):
            _refuse(eqn, f"{eqn.op} joins rows of a mask with other dimensions")
        return self.masks.split(mask, out.shape[there[0]]) or mask

    def result(self, eqn: Equation, here: Equation, twice: Equation, few: Equation, masks: tuple[Mask, Mask]) -> Any:
        mask, given, made = masks[0], self.rows.has(eqn.inputs()), eqn.opname in MADE
        triples = {m.sizes for m in masks}
        for (number, two), (_, less) in zip(_numbers(eqn, twice), _numbers(eqn, few), strict=True):
            if (number, two, less) != (number,) * 3 and (number, two, less) not in triples:
                self.refuse_number(eqn)
        if not given and not made and eqn.opname != "expand" and not draws(eqn.op, eqn.args, eqn.kwargs):
            _refuse(eqn, f"{eqn.op} makes as many as a mask selects")
        apart = not given or made or eqn.opname in RESHAPES
        way = How.APART if apart else how(eqn, twice, self.rows)
        if way == How.APART:
            return self.apart(eqn, here, twice, masks)
        if isinstance(arguments(eqn).get("reduction"), int):
            return self.loss(eqn, here, mask, way)
        dims = {v: self.rows.dims(v) for v in tensors(eqn) if self.rows.dims(v)}
        alone = all(len(there) == 1 for there in dims.values()) and (way != How.TOGETHER or len(tensors(eqn)) == 1)
        if alone and eqn.opname in ORDERS:
            (dim,) = dims[tensors(eqn)[0]]
            out = in_order(self.rewrite, eqn, here, mask, dim)
        else:
            out = together(self.rewrite, eqn, here, mask, {v: d for v, (d,) in dims.items()}) if alone else None
        if out is None:
            _refuse(eqn, f"{eqn.op} looks at rows of a mask together")
        return out

    def apart(self, eqn: Equation, here: Equation, twice: Equation, masks: tuple[Mask, Mask]) -> Any:
        every = {m.size: m.every for m in masks}

        def resized(now: Arg, mine: Arg, theirs: Arg) -> Arg:
            if isinstance(now, (list, tuple)):
                return [resized(*each) for each in zip(now, mine, theirs, strict=True)]  # type: ignore[arg-type]
            if isinstance(mine, (Value, Trace)) or mine is None or mine == theirs:
                return now
            if mine not in every:
                self.refuse_number(eqn)
            return every[mine] if eqn.opname not in COUNTED else cast(masks[0].count, eqn.out.dtype)  # type: ignore[index]

        args = [resized(*each) for each in zip(here.args, eqn.args, twice.args, strict=True)]
        kwargs = {name: resized(a, eqn.kwargs[name], twice.kwargs[name]) for name, a in here.kwargs.items()}
        return self.rewrite.builder.emit(eqn.op, *args, **kwargs)

    def loss(self, eqn: Equation, here: Equation, mask: Mask, way: How) -> Any:
        given = arguments(here)
        if eqn.opname in LABELLED and not (target := given["target"]).tensor.is_float:
            places = {target: kept(mask, target, 0, given["ignore_index"])}
            return self.rewrite.builder.emit(eqn.op, *here.substitute(places).args, **here.kwargs)
        if eqn.many or any(self.rows.dims(v) != [0] for v in tensors(eqn) if self.rows.dims(v)):
            _refuse(eqn, f"{eqn.op} averages rows of a mask")
        each: Any = self.rewrite.builder.emit(eqn.op, *_without_reduction(here), **here.bound()[1])
        out = aten.sum(kept(mask, each, 0, 0))
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
        mask = next((m for m in self.masks.all() if number % m.size == 0), None)
        times = number // mask.size if mask is not None else 0
        if mask is None or twice.args[place] != times * mask.sizes[1]:
            self.refuse_number(eqn)
        # `max(len(rows), 1)` is another number where there are none
        least: Any = few.args[place] if mask.sizes[2] == 0 else 0
        if least not in (0, 1) or few.args[place] != max(times * mask.sizes[2], least):
            self.refuse_number(eqn)
        with self.rewrite.at(eqn):
            count = aten.clamp_min(aten.mul(mask.count, times), least)
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
