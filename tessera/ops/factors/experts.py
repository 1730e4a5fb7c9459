"""The sharding rule of experts, and what a rank does that has some of them.

Tokens may be cut, experts, and what stands between an expert's layers; of the last two, results are summands. Where an
axis of experts has split both tokens and experts, rows are exchanged: each rank sorts its rows by expert, ranks tell
each other how many rows each expert gets, rows go to the ranks of their experts, and what those make of them comes
back. Sizes are those of the worst case, so that one text serves all ranks and all batches; what is sent is what there
is. A rank whose experts get no row takes part in everything. Where there are many rows they go in parts, so that
some travel while experts work on others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Equation, Value
from tessera.ops.experts import pull_experts, run_experts
from tessera.ops.factors.rule import Cut, Dims, Factors, rule

PART = 1 << 20  # bytes of rows that are worth a part of their own
PARTS = 4  # at most: each adds to gradients of all of a rank's experts
TOKENS, EXPERTS, BETWEEN = "t", "x", "f"
ROW, CHOICE = ((TOKENS,), ("d",)), ((TOKENS,), ("k",))
UP, DOWN = ((EXPERTS,), (BETWEEN,), ("d",)), ((EXPERTS,), ("d",), (BETWEEN,))


def _factors(operands: list[Dims], results: list[Dims], sums: str, local: object) -> Factors:
    return Factors(
        tuple(operands),
        tuple(results),
        {f: "sum" for f in sums.split()},
        frozenset("dkz"),
        local=local,  # type: ignore[arg-type]
        pairs=((TOKENS, EXPERTS),),
        unread=frozenset(),
    )


def _stacks(gate: object) -> list[Dims]:
    return [UP, DOWN] if gate is None else [UP, DOWN, UP]


@rule("tessera.experts")
def experts(eqn: Equation) -> Factors:
    gate = eqn.args[5]
    return _factors([ROW, CHOICE, CHOICE, *_stacks(gate)], [ROW], f"{EXPERTS} {BETWEEN}", _run_here)


@rule("tessera.experts_backward")
def experts_backward(eqn: Equation) -> Factors:
    gate = eqn.args[6]
    last: Dims = UP if gate is not None else (("z",),)
    operands = [ROW, ROW, CHOICE, CHOICE, *_stacks(gate)]
    return _factors(operands, [ROW, CHOICE, UP, DOWN, last], f"{TOKENS} {EXPERTS} {BETWEEN}", _pull_here)


# --- what a rank does -----------------------------------------------------------------------------


def _own(choice: Value, count: int, cut: Cut) -> Value:
    """Choices counted from a rank's first expert; those of others are none."""
    axes = cut.axes.get(EXPERTS, ())
    return aten.sub(choice, cut.start(count, axes, choice.tensor.device)) if axes else choice


def _axis(cut: Cut) -> str | None:
    """The axis along which rows are exchanged."""
    return next((a for a in cut.axes.get(EXPERTS, ()) if a in cut.axes.get(TOKENS, ())), None)


def _run_here(eqn: Equation, cut: Cut) -> object:
    tokens, choice, weights, *stacks, activation, most = eqn.args
    count, axis = int(cut.whole[3][0]), _axis(cut)
    if axis is None:
        return emit(run_experts, tokens, _own(choice, count, cut), weights, *stacks, activation, most)  # type: ignore[arg-type]
    every = _send_parts(tokens, choice, count, most, axis, cut)  # type: ignore[arg-type]
    return aten.sum(aten.mul(_worked(every, stacks, activation), aten.unsqueeze(weights, -1)), [1])


def _worked(every: list[Sent], stacks: list, activation: object) -> Value:
    """What the experts made of all rows, [T, k, d], where those are that sent them."""
    outputs = [emit(run_experts, sent.rows, sent.ids, sent.ones(), *stacks, activation, 0) for sent in every]
    return _unsorted(every, outputs)


def _pull_here(eqn: Equation, cut: Cut) -> object:
    ct, tokens, choice, weights, *stacks, activation, most = eqn.args
    count, axis = int(cut.whole[4][0]), _axis(cut)
    if axis is None:
        own = _own(choice, count, cut)  # type: ignore[arg-type]
        return emit(pull_experts, ct, tokens, own, weights, *stacks, activation, most)
    every = _send_parts(tokens, choice, count, most, axis, cut)  # type: ignore[arg-type]
    each = aten.unsqueeze(ct, 1)
    d_weights = aten.sum(aten.mul(_worked(every, stacks, activation), each), [2])
    cts = _in_parts(aten.mul(each, aten.unsqueeze(weights, -1)), len(every))
    wanted = [sent.went(part) for sent, part in zip(every, cts, strict=True)]
    pulled = [
        emit(pull_experts, ct, sent.rows, sent.ids, sent.ones(), *stacks, activation, 0)
        for sent, ct in zip(every, wanted, strict=True)
    ]
    d_rows, _, *d_stacks = zip(*pulled, strict=True)
    return [aten.sum(_unsorted(every, d_rows), [1]), d_weights, *(functools.reduce(_added, d) for d in d_stacks)]


def _added(a: Value | None, b: Value | None) -> Value | None:
    return None if a is None else aten.add(a, b)


# --- rows in parts --------------------------------------------------------------------------------


def _send_parts(tokens: Value, choice: Value, count: int, most: int, axis: str, cut: Cut) -> list[Sent]:
    """In parts, if there are rows enough. A capacity is for all of them at once."""
    rows = int(tokens.shape[0])
    sent = rows * int(choice.shape[1]) * int(tokens.shape[1]) * tokens.dtype.itemsize
    parts = 1 if most else max(n for n in range(1, PARTS + 1) if n == 1 or (rows % n == 0 and sent >= n * PART))
    told = [_tell(chosen, count, axis, cut) for chosen in _in_parts(choice, parts)]  # before rows are on their way
    return [_send(x, part, count, most, cut) for x, part in zip(_in_parts(tokens, parts), told, strict=True)]


def _in_parts(x: Value, parts: int) -> list[Value]:
    step = int(x.shape[0]) // parts
    return [x] if parts == 1 else [aten.slice(x, 0, i * step, (i + 1) * step) for i in range(parts)]


def _unsorted(every: list[Sent], rows: Sequence[Value]) -> Value:
    """All rows where they came from, [T, k, d]. They are read together, so that while some are on their way back the
    experts work on the others."""
    back = [sent.returned(x) for sent, x in zip(every, rows, strict=True)]
    places, first = [], 0
    for sent in every:
        _, place = aten.sort(sent.told.order, stable=True)
        places.append(aten.add(place, first) if first else place)
        first += sent.told.shape[0] * sent.told.shape[1]
    at, came = (x[0] if len(every) == 1 else aten.cat(x) for x in (places, back))
    return aten.reshape(aten.index_select(came, 0, at), [-1, every[0].told.shape[1], came.shape[-1]])


@dataclass(frozen=True)
class Told:
    """How many rows go where: ranks have told each other."""

    axis: str
    order: Value  # of the choices of a rank's own tokens, expert by expert
    shape: tuple[int, int]  # of the choice
    give: Value  # rows for each rank
    take: Value  # rows from each rank
    coming: Value  # rows that come, by rank and expert


def _tell(choice: Value, count: int, axis: str, cut: Cut) -> Told:
    ranks, device = cut.mesh.mesh.size(axis), choice.tensor.device
    own, shape = count // ranks, (int(choice.shape[0]), int(choice.shape[1]))
    known = aten.logical_and(aten.ge(choice, 0), aten.lt(choice, count))
    flat = aten.reshape(aten.where(known, choice, aten.full_like(choice, count)), [shape[0] * shape[1]])
    _, order = aten.sort(flat, stable=True)
    zeros = aten.zeros([count + 1], dtype=torch.int64, device=device)
    counts = aten.slice(aten.scatter_add(zeros, 0, flat, aten.ones_like(flat, dtype=torch.int64)), 0, 0, count)
    counts = aten.reshape(counts, [ranks, own])
    coming = aten.reshape(emit(cut.mesh.all_to_all, counts, 0, 1, axis), [ranks, own])
    return Told(axis, order, shape, aten.sum(counts, [1]), aten.sum(coming, [1]), coming)


@dataclass(frozen=True)
class Sent:
    """Rows of all ranks that have come to this one's experts, and the way back."""

    cut: Cut
    told: Told
    room: int  # for rows that come
    ids: Value  # the expert of each row that came, counted from a rank's first; the number of them where there is none
    rows: Value

    def ones(self) -> Value:
        return aten.new_ones(self.rows, [self.room, 1])

    def went(self, each: Value) -> Value:
        """A row for each choice, sorted expert by expert, where the experts are."""
        told, count = self.told, self.told.shape[0] * self.told.shape[1]
        rows = aten.index_select(aten.reshape(each, [count, each.shape[-1]]), 0, told.order)
        return emit(self.cut.mesh.rows, rows, told.give, told.take, told.axis, self.room)

    def returned(self, rows: Value) -> Value:
        told, count = self.told, self.told.shape[0] * self.told.shape[1]
        return emit(self.cut.mesh.rows, rows, told.take, told.give, told.axis, count, "back")


def _send(tokens: Value, told: Told, count: int, most: int, cut: Cut) -> Sent:
    ranks, device = cut.mesh.mesh.size(told.axis), tokens.tensor.device
    own, total = count // ranks, told.shape[0] * told.shape[1]
    room = min(ranks * total, own * most) if most else ranks * total
    rows = aten.index_select(tokens, 0, aten.div(told.order, told.shape[1], rounding_mode="floor"))
    got = emit(cut.mesh.rows, rows, told.give, told.take, told.axis, room)
    ends, place = aten.cumsum(aten.reshape(told.coming, [count]), 0), aten.arange(room, device=device)
    at = aten.searchsorted(ends, place, right=True)
    ids = aten.where(aten.lt(at, count), aten.remainder(at, own), aten.full_like(at, own))
    return Sent(cut, told, room, aten.unsqueeze(ids, 1), got)
