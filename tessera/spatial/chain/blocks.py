"""A model of equal blocks in three kinds of segments: what stands before them, a block, what stands behind.

In: a captured model, and how many equal blocks it has. Out: a program for each kind, which reads what the segment
before it leaves, and the weights of every block. What is made before the first block and read by all of them, each
computes for itself. Invariant: run one after the other, the segments compute what the model does.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tessera.ir.equation import Equation, Value, values_in
from tessera.ir.repeats import number
from tessera.ir.trace import Trace
from tessera.passes.clean.dce import dce
from tessera.spatial.capture import Captured
from tessera.spatial.errors import MapError
from tessera.spatial.listing.chain import COMMON

TRIES = 16  # sizes of a block, of those that repeat themselves longest
Weights = dict[Value, tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Segment:
    """A program whose inputs `carried` are what the segment before it left; `leaves`: its outputs stay on the chips.
    Weights that are `varying` are others in other segments with the same program."""

    got: Captured
    carried: tuple[Value, ...]
    leaves: bool
    varying: frozenset[Value] = frozenset()

    def with_weights(self, weights: Weights, varying: frozenset[Value]) -> Segment:
        return replace(self, got=replace(self.got, weights=weights), varying=varying)


@dataclass(frozen=True)
class Segments:
    before: Segment
    blocks: list[Segment]  # the same program, each with weights of its own
    behind: Segment


def segments(got: Captured, count: int) -> Segments:
    """The segments of a model that has so many equal blocks."""
    if (split := _split(got, count)) is None:
        raise MapError(f"{got.trace.name} has no {count} equal blocks one behind the other")
    return split.segments()


def equal_blocks(got: Captured) -> int:
    """How many equal blocks make up most of a model; 0 where nothing repeats itself."""
    known: dict[Hashable, int] = {}
    numbers = [known.setdefault(number(eqn), len(known)) for eqn in got.trace.equations]
    longest = {p: max(map(len, _runs(numbers, p)), default=0) for p in range(1, len(numbers) // 2 + 1)}
    repeated = sorted((p for p, length in longest.items() if length >= p), key=lambda p: (-longest[p] - p, p))
    for period in repeated[:TRIES]:
        count = longest[period] // period + 1
        for blocks in (count + 1, count):  # the first may have more equations than the others
            if _split(got, blocks) is not None:
                return blocks
    return 0


def _split(got: Captured, count: int) -> _Split | None:
    size = len(got.trace.equations)
    numbers = [number(eqn) for eqn in got.trace.equations]
    for period in range(size // count if count > 1 else 0, 0, -1):
        # The first block may have equations that make what all the others read.
        if not any(len(run) >= (count - 2) * period for run in _runs(numbers, period)):
            continue
        hoisted = replace(got, trace=_hoisted(got.trace, 2 * period))
        starts = [
            start
            for run in _runs([number(eqn) for eqn in hoisted.trace.equations], period)
            for start in range(run.start, run.stop - (count - 1) * period + 1)
        ]
        for start in _ordered(hoisted.trace, starts, period, count):
            if (split := _Split(hoisted, start, period, count)).is_chain():
                return split
    return None


def _runs(numbers: Sequence[Hashable], period: int) -> Iterator[range]:
    """Equations that are like those a period later."""
    alike = [a == b for a, b in zip(numbers, numbers[period:], strict=False)]
    at = 0
    for same, group in itertools.groupby(alike):
        stop = at + len(list(group))
        if same:
            yield range(at, stop)
        at = stop


def _hoisted(trace: Trace, far: int) -> Trace:
    """The trace with what is read far behind the equation that makes it, and what that is made of, at the beginning."""
    last_read = {v: i for i, eqn in enumerate(trace.equations) for v in eqn.inputs()}
    wanted = {v for v, i in trace.places().items() if last_read.get(v, i) - i > far}
    early, others = [], []
    for eqn in reversed(trace.equations):
        if any(v in wanted for v in eqn.results()):
            wanted.update(eqn.inputs())
            early.append(eqn)
        else:
            others.append(eqn)
    return trace.with_(equations=(*early[::-1], *others[::-1]))


def _ordered(trace: Trace, starts: list[int], period: int, count: int) -> list[int]:
    """Where blocks may begin; first where the fewest values are carried from one to the next."""
    last_read = {v: i for i, eqn in enumerate(trace.equations) for v in eqn.inputs()}
    last_read |= dict.fromkeys(trace.results(), len(trace.equations))
    place_of = trace.places()

    def carried(start: int) -> int:
        border = start + (count - 1) * period
        return sum(border - period <= place < border <= last_read.get(v, -1) for v, place in place_of.items())

    return sorted(starts, key=carried)


class _Split:
    """Equations from `start` on as `count` blocks of `period`; the last of them stands for all."""

    def __init__(self, got: Captured, start: int, period: int, count: int) -> None:
        self.got, self.trace, self.start, self.period, self.count = got, got.trace, start, period, count
        self.place_of = self.trace.places()
        self.end = start + period * count
        self.base = self.end - period
        body = self.trace.equations[self.base : self.end]
        read = dict.fromkeys(v for eqn in body for v in eqn.inputs() if self.place_of.get(v, self.base) < self.base)
        self.carried = tuple(v for v in read if self.place_of[v] >= self.base - period)
        self.shared = [v for v in read if self.place_of[v] < start]
        self.simple = len(read) == len(self.carried) + len(self.shared)  # no block reads far behind
        self.leaves = tuple(self.later(v) for v in self.carried)
        self.bound: list[dict[Value, Value]] = []  # what each block has for the values of the last one

    def later(self, v: Value) -> Value:
        """What stands where a value does, a block later."""
        place = self.place_of[v]
        at = self.trace.equations[place].outputs.index(v)
        other = self.trace.equations[place + self.period].outputs[at]
        assert other is not None
        return other

    def is_chain(self) -> bool:
        if not self.simple or not self.carried:
            return False
        before: dict[Value, Value] | None = None
        for i in range(self.count):
            bound = self.matched(self.start + i * self.period)
            if bound is None or any(v not in bound for v in self.carried):
                return False
            if before is not None and any(
                bound[v] is not before[left] for v, left in zip(self.carried, self.leaves, strict=True)
            ):
                return False
            self.bound.append(bound)
            before = bound
        inside = range(self.start, self.end)
        behind = [v for eqn in self.trace.equations[self.end :] for v in eqn.inputs()]
        wanted = [v for v in [*behind, *values_in(self.trace.outputs)] if self.place_of.get(v, -1) in inside]
        return set(wanted) <= set(self.leaves)

    def matched(self, first: int) -> dict[Value, Value] | None:
        """Of the values of the last block, those that the block which begins here has in their place."""
        bound: dict[Value, Value] = {}
        for i in range(self.period):
            one, other = self.trace.equations[self.base + i], self.trace.equations[first + i]
            if one is not other and number(one) != number(other):
                return None
            for x, y in zip(one.inputs(), other.inputs(), strict=True):
                if bound.setdefault(x, y) is not y or not self.alike(x, y):
                    return None
            bound.update((a, b) for a, b in zip(one.outputs, other.outputs, strict=True) if a is not None and b)
        states = self.trace.mutations
        alike = all((v in states) == (w in states) for v, w in bound.items() if v in self.got.weights)
        after = all(states[bound[v]] is bound.get(w) for v, w in states.items() if v in bound and bound[v] in states)
        return bound if alike and after else None

    def alike(self, x: Value, y: Value) -> bool:
        if self.place_of.get(x, -1) >= self.base or x in self.carried:
            return x.type == y.type
        return x is y or (x in self.got.weights and y in self.got.weights and x.type == y.type)

    def segments(self) -> Segments:
        equations = self.trace.equations
        first = tuple(self.bound[0][v] for v in self.carried)
        last = dict(zip(self.leaves, self.carried, strict=True))  # what is behind reads what the last block leaves
        behind = [eqn.substitute(last) for eqn in equations[self.end :]]
        outputs = tuple(last.get(o, o) if isinstance(o, Value) else o for o in self.trace.outputs)
        block = self.segment(self.shared, equations[self.base : self.end], self.leaves, True)
        early = {v for eqn in behind for v in eqn.inputs() if self.place_of.get(v, self.start) < self.start}
        early |= {v for v in values_in(outputs) if self.place_of.get(v, self.start) < self.start}
        weights = [{v: self.weight(v, bound.get(v, v)) for v in block.got.weights} for bound in self.bound]
        varying = frozenset(v for v in block.got.weights if self.varies(v))
        return Segments(
            self.segment(first, (), first, True, whole=True),
            [block.with_weights(own, varying) for own in weights],
            self.segment(early - set(self.carried), behind, outputs, False),
        )

    def weight(self, v: Value, own: Value) -> tuple[str, torch.Tensor]:
        """A block's own weight, by a name that is the same in all."""
        (name, data), (last, _) = self.got.weights[own], self.got.weights[v]
        if self.is_common(v):
            return f"{COMMON}_{name}", data
        first = self.got.weights[self.bound[0].get(v, v)][0].split(".")
        words = [word for word, other in zip(last.split("."), first, strict=False) if word == other]
        return ".".join(["own", *words] if not words or words[0].startswith(COMMON) else words), data

    def is_common(self, v: Value) -> bool:
        return all(bound.get(v, v) is v for bound in self.bound)

    def varies(self, v: Value) -> bool:
        """A number that is the same in all blocks may become a part of their program; all else of their own may not."""
        data = self.got.weights[v][1]
        others = (self.got.weights[bound.get(v, v)][1] for bound in self.bound)
        return not self.is_common(v) and (data.numel() > 1 or not all(torch.equal(data, other) for other in others))

    def segment(
        self, early: Iterable[Value], equations: Iterable[Equation], outputs: tuple, leaves: bool, whole: bool = False
    ) -> Segment:
        """Equations with those from before all blocks that they need; `whole`: with all of these."""
        head = self.trace.equations[: self.start] if whole else self.needed(early)
        computed = {v for eqn in (*head, *equations) for v in eqn.results()}
        states = {v: after for v, after in self.trace.mutations.items() if after in computed}
        body = dce(self.trace.with_(equations=(*head, *equations), outputs=outputs, mutations=states, symbols={}))
        read = {v for eqn in body.equations for v in eqn.inputs()} | set(values_in(outputs)) | set(states)
        carried = () if whole else self.carried
        inputs = tuple(v for v in self.trace.inputs if v in read)
        constants = {v: data for v, data in self.trace.constants.items() if v in read}
        trace = body.with_(inputs=(*carried, *inputs), constants=constants)
        weights = {v: self.got.weights[v] for v in inputs if v in self.got.weights}
        return Segment(Captured(trace, self.got.mode, weights), carried, leaves)

    def needed(self, values: Iterable[Value]) -> tuple[Equation, ...]:
        """The equations before all blocks that some values come from."""
        wanted, kept = set(values), []
        for eqn in reversed(self.trace.equations[: self.start]):
            if any(v in wanted for v in eqn.results()):
                if any(v in self.trace.mutations for v in eqn.inputs()):
                    raise MapError(f"blocks read what is made of a state before them: called at {eqn.source}")
                kept.append(eqn)
                wanted.update(eqn.inputs())
        return tuple(reversed(kept))
