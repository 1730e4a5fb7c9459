"""The sharding rule of experts, and what a rank does that has some of them.

Tokens may be cut, experts, and what stands between an expert's layers; of the last two, results are summands. Where an
axis of experts has split both tokens and experts, rows are exchanged: each rank sorts its rows by expert, ranks tell
each other how many rows each expert gets, rows go to the ranks of their experts, and what those make of them comes
back. Sizes are those of the worst case, so that one text serves all ranks and all batches; what is sent is what there
is. A rank whose experts get no row takes part in everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Equation, Value
from tessera.ops.experts import pull_experts, run_experts
from tessera.ops.factors.rule import Cut, Dims, Factors, rule

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
    sent = _send(tokens, choice, count, most, axis, cut)  # type: ignore[arg-type]
    back = _worked(sent, stacks, activation)
    return aten.sum(aten.mul(back, aten.unsqueeze(weights, -1)), [1])


def _worked(sent: Sent, stacks: list, activation: object) -> Value:
    """What the experts made of all rows, [T, k, d], where those are that sent them."""
    made = emit(run_experts, sent.rows, sent.ids, sent.ones(), *stacks, activation, 0)
    return sent.unsorted(sent.returned(made))


def _pull_here(eqn: Equation, cut: Cut) -> object:
    ct, tokens, choice, weights, *stacks, activation, most = eqn.args
    count, axis = int(cut.whole[4][0]), _axis(cut)
    if axis is None:
        own = _own(choice, count, cut)  # type: ignore[arg-type]
        return emit(pull_experts, ct, tokens, own, weights, *stacks, activation, most)
    sent = _send(tokens, choice, count, most, axis, cut)  # type: ignore[arg-type]
    each = aten.unsqueeze(ct, 1)
    d_weights = aten.sum(aten.mul(_worked(sent, stacks, activation), each), [2])
    wanted = sent.went(sent.sorted(aten.mul(each, aten.unsqueeze(weights, -1))))
    d_rows, _, *d_stacks = emit(pull_experts, wanted, sent.rows, sent.ids, sent.ones(), *stacks, activation, 0)
    d_tokens = aten.sum(sent.unsorted(sent.returned(d_rows)), [1])
    return [d_tokens, d_weights, *d_stacks]


@dataclass(frozen=True)
class Sent:
    """Rows of all ranks that have come to this one's experts, and the way back."""

    cut: Cut
    axis: str
    order: Value  # of the choices of a rank's own tokens, expert by expert
    shape: tuple  # of the choice
    give: Value  # rows for each rank
    take: Value  # rows from each rank
    room: int  # for rows that come
    ids: Value  # the expert of each row that came, counted from a rank's first; the number of them where there is none
    rows: Value

    def ones(self) -> Value:
        return aten.new_ones(self.rows, [self.room, 1])

    def went(self, rows: Value) -> Value:
        return emit(self.cut.mesh.rows, rows, self.give, self.take, self.axis, self.room)

    def returned(self, rows: Value) -> Value:
        count = self.shape[0] * self.shape[1]
        return emit(self.cut.mesh.rows, rows, self.take, self.give, self.axis, count, "back")

    def sorted(self, each: Value) -> Value:
        """A row for each choice, expert by expert."""
        return aten.index_select(aten.reshape(each, [self.shape[0] * self.shape[1], each.shape[-1]]), 0, self.order)

    def unsorted(self, rows: Value) -> Value:
        _, places = aten.sort(self.order, stable=True)
        return aten.reshape(aten.index_select(rows, 0, places), [*self.shape, rows.shape[-1]])


def _send(tokens: Value, choice: Value, count: int, most: int, axis: str, cut: Cut) -> Sent:
    ranks, device = cut.mesh.mesh.size(axis), tokens.tensor.device
    own, shape = count // ranks, (int(choice.shape[0]), int(choice.shape[1]))
    total = shape[0] * shape[1]
    room = min(ranks * total, own * most) if most else ranks * total
    known = aten.logical_and(aten.ge(choice, 0), aten.lt(choice, count))
    flat = aten.reshape(aten.where(known, choice, aten.full_like(choice, count)), [total])
    _, order = aten.sort(flat, stable=True)
    zeros = aten.zeros([count + 1], dtype=torch.int64, device=device)
    counts = aten.slice(aten.scatter_add(zeros, 0, flat, aten.ones_like(flat, dtype=torch.int64)), 0, 0, count)
    counts = aten.reshape(counts, [ranks, own])
    told = aten.reshape(
        emit(cut.mesh.all_to_all, counts, 0, 1, axis), [ranks, own]
    )  # rows that come, by rank and expert
    give, take = (aten.sum(x, [1]) for x in (counts, told))
    rows = aten.index_select(tokens, 0, aten.div(order, shape[1], rounding_mode="floor"))
    ends, place = aten.cumsum(aten.reshape(told, [count]), 0), aten.arange(room, device=device)
    at = aten.searchsorted(ends, place, right=True)
    here = aten.lt(at, count)
    ids = aten.where(here, aten.remainder(at, own), aten.full_like(at, own))
    got = emit(cut.mesh.rows, rows, give, take, axis, room)
    return Sent(cut, axis, order, shape, give, take, room, aten.unsqueeze(ids, 1), got)
