"""Small exchanges between ranks are joined, so that their latency is paid once.

In: one rank's program in its final order. Out: the same values. Exchanges of one kind, along one axis, of one dtype,
none above `small` bytes, become one of at most `room` bytes: their operands are put side by side as soon as the last
one is there, and taken apart before the first reader. Bytes on the link stay the same. Sums and scattered sums are
taken apart as views; gathered chunks are copied once more, which is why large ones stay alone. The program alone
decides, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from tessera.ir.builder import Builder
from tessera.ir.dist import Collective, axis_in, is_collective, on
from tessera.ir.equation import Equation, Value, values_in
from tessera.ir.trace import Trace

SMALL, ROOM = 1 << 20, 32 << 20  # bytes
IN_A_BUCKET = "in a bucket"
JOINED = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass
class Bucket:
    """Exchanges that become one: it can stand after `ready`, and before `used`."""

    ready: int
    used: int
    members: list[Equation] = field(default_factory=list)
    nbytes: int = 0

    def takes(self, ready: int, used: int, nbytes: int, room: int) -> bool:
        return max(self.ready, ready) < min(self.used, used) and self.nbytes + nbytes <= room

    def add(self, eqn: Equation, ready: int, used: int, nbytes: int) -> None:
        self.members.append(eqn)
        self.ready, self.used, self.nbytes = max(self.ready, ready), min(self.used, used), self.nbytes + nbytes


def bucket(trace: Trace, small: int = SMALL, room: int = ROOM) -> Trace:
    """The trace itself where nothing can be joined."""
    buckets = [b for b in _chosen(trace, small, room) if len(b.members) > 1]
    return trace.with_(equations=tuple(_Joined(trace, buckets).run())) if buckets else trace


class _Joined:
    """The program with its buckets: each is exchanged when it is ready, and taken apart when somebody reads."""

    def __init__(self, trace: Trace, buckets: list[Bucket]) -> None:
        self.trace, self.builder = trace, Builder.over(trace)
        self.kept = {*values_in(trace.outputs), *trace.mutations.values()}
        self.waiting = {eqn.out: b for b in buckets for eqn in b.members}  # results that are not there yet
        self.ready: dict[int, list[Bucket]] = {}
        for b in buckets:
            self.ready.setdefault(b.ready, []).append(b)
        self.flats: dict[int, Value] = {}

    def run(self) -> list[Equation]:
        gone = set(self.waiting)
        self.exchange(self.ready.get(-1, ()))
        for i, eqn in enumerate(self.trace.equations):
            if not gone.intersection(eqn.results()):
                self.need(eqn.inputs())
                self.builder.append(eqn)
            self.exchange(self.ready.get(i, ()))
        self.need([*values_in(self.trace.outputs), *self.trace.mutations.values()])
        return self.builder.equations

    def exchange(self, buckets: Sequence[Bucket]) -> None:
        for b in buckets:
            if id(b) not in self.flats:
                self.need([v for eqn in b.members for v in eqn.inputs()])
                self.flats[id(b)] = _exchanged(self.builder, b.members)

    def need(self, values: Sequence[Value]) -> None:
        for v in values:
            if v in self.waiting:
                b = self.waiting[v]
                self.exchange([b])
                _taken_apart(self.builder, self.flats[id(b)], b.members, self.kept)
                for eqn in b.members:
                    self.waiting.pop(eqn.out)


def members(eqn: Equation) -> int:
    """How many exchanges an equation, or the one that it begins, was made of."""
    count, _, rest = eqn.source.note.partition(" ")
    return int(count) if rest == IN_A_BUCKET else 1


def _chosen(trace: Trace, small: int, room: int) -> list[Bucket]:
    made = {v: i for i, eqn in enumerate(trace.equations) for v in eqn.results()}
    used = dict.fromkeys([*values_in(trace.outputs), *trace.mutations.values()], len(trace.equations))
    for i in range(len(trace.equations) - 1, -1, -1):
        used |= dict.fromkeys(trace.equations[i].inputs(), i)
    open_: dict[tuple, Bucket] = {}
    buckets = []
    joinable = {eqn.out for eqn in trace.equations if _joinable(eqn, small) and eqn.out in used}
    for i, eqn in enumerate(trace.equations):
        if not joinable.intersection(eqn.results()):
            continue
        (x,) = eqn.inputs()
        ready = i - 1 if x in joinable else made.get(x, -1)  # what another bucket brings is there when it is read
        place = ready, used[eqn.out], max(x.nbytes(), eqn.out.nbytes())
        how = eqn.args[2:] if is_collective(eqn, "all_reduce") else ()
        key = eqn.op, axis_in(eqn.args[1:]), x.dtype, x.tensor.device, how  # type: ignore[arg-type]
        if key not in open_ or not open_[key].takes(*place, room):
            open_[key] = Bucket(-1, len(trace.equations))
            buckets.append(open_[key])
        open_[key].add(eqn, *place)
    return buckets


def _joinable(eqn: Equation, small: int) -> bool:
    if not is_collective(eqn, *JOINED):
        return False
    (x,) = eqn.inputs()
    if not all(type(n) is int for n in (*x.shape, *eqn.out.shape)) or max(x.nbytes(), eqn.out.nbytes()) > small:
        return False
    if is_collective(eqn, "reduce_scatter"):  # without padding
        _, dim, axis = eqn.args
        return x.shape[dim] % eqn.op.mesh.size(axis) == 0  # type: ignore[union-attr, index, operator, arg-type]
    return True


def _exchanged(builder: Builder, group: Sequence[Equation]) -> Value:
    """Operands side by side, as chunks for each rank where they are scattered; then one exchange."""
    op = group[0].op
    assert isinstance(op, Collective)
    with builder.at(group[0], f"{len(group)} {IN_A_BUCKET}"):
        flat = builder.call("cat", [_flat(builder, eqn) for eqn in group], -1)
        axis, rest = axis_in(group[0].args[1:]), group[0].args[2:]
        args = (axis, *rest) if op.name == "all_reduce" else (0, axis)
        return builder.emit(getattr(on(op.mesh), op.name), flat, *args)  # type: ignore[arg-type, return-value]


def _flat(builder: Builder, eqn: Equation) -> Value:
    x, op = eqn.inputs()[0], eqn.op
    if not is_collective(eqn, "reduce_scatter"):
        return builder.call("reshape", x, [x.numel()])  # type: ignore[return-value]
    _, dim, axis = eqn.args
    ranks, shape = op.mesh.size(axis), x.shape  # type: ignore[union-attr, arg-type]
    split = builder.call("reshape", x, [*shape[:dim], ranks, shape[dim] // ranks, *shape[dim + 1 :]])  # type: ignore[index, operator, misc]
    first = builder.call("movedim", split, dim, 0) if dim else split  # type: ignore[arg-type]
    return builder.call("reshape", first, [ranks, x.numel() // ranks])  # type: ignore[arg-type, return-value, operator]


def _taken_apart(builder: Builder, flat: Value, members: Sequence[Equation], kept: set[Value]) -> None:
    at = 0
    for eqn in members:
        with builder.at(eqn):
            gathered = is_collective(eqn, "all_gather")
            count = int(prod(eqn.inputs()[0].shape if gathered else eqn.out.shape))  # type: ignore[arg-type]
            if gathered:
                part = _gathered(builder, flat, eqn, at, count)
            else:
                part = builder.call("slice", flat, flat.ndim - 1, at, at + count)
                part = builder.call("reshape", part, list(eqn.out.shape))
            # an exchange gives dense tensors, and what the caller gets holds no bucket
            if eqn.out in kept or part.tensor.stride != eqn.out.tensor.stride:  # type: ignore[union-attr]
                builder.call("clone", part, memory_format=torch.contiguous_format)  # type: ignore[arg-type]
        builder.equations[-1] = builder.equations[-1].with_(outputs=(eqn.out,))
        at += count


def _gathered(builder: Builder, flat: Value, eqn: Equation, at: int, count: int) -> Value:
    """One member's chunks, put together along its dimension, without padding."""
    x, ranks = eqn.inputs()[0], eqn.op.mesh.size(axis_in(eqn.args[1:]))  # type: ignore[union-attr, arg-type]
    dim, size = eqn.args[1], eqn.args[3] if len(eqn.args) > 3 else None
    rows = builder.call("reshape", flat, [ranks, flat.numel() // ranks])  # type: ignore[operator]
    part = builder.call("reshape", builder.call("slice", rows, 1, at, at + count), [ranks, *x.shape])  # type: ignore[arg-type]
    there = builder.call("movedim", part, 0, dim) if dim else part  # type: ignore[arg-type]
    whole = [n * ranks if d == dim else n for d, n in enumerate(x.shape)]
    out = builder.call("reshape", there, whole)  # type: ignore[arg-type]
    return builder.call("slice", out, dim, 0, size) if size not in (None, whole[dim]) else out  # type: ignore
