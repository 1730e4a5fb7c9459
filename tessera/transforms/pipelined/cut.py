"""Cuts a differentiated program into the stages of a pipeline.

In: a `Joint` (whole, or one rank's of the other axes), a number of stages. Out: `Stages`: for each stage three programs
(forward; the part of backward that earlier stages wait for; the part that makes gradients of weights) and the values
that stages send each other. Run in any order that a schedule allows, they compute what the joint program computes, bit
for bit. Every equation stands in one of them, except four kinds:

    made from nothing, and views in backward   stand in every program that reads them
    made of weights alone, as gathers are      stand in every stage that reads them
    drawn at random                            stand in a program of their own, which every rank runs
    computed again by backward                 stand on the stage that computed them first

An equation of the backward stands on the last stage that has the values of the forward it reads, and no later than its
cotangents; where it reads none and only makes gradients, on the stage of those weights. What another stage computes
again is not waited for: what the forward sent is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tessera.ir.equation import Equation, Value, values_in
from tessera.ir.schema import draws, has_effect, is_view
from tessera.ir.trace import Trace
from tessera.ops.op import rules
from tessera.transforms.pipelined.places import Where, cost_of, stages_of
from tessera.transforms.vjp import Joint
from tessera.util.errors import OptionError

KINDS = ("F", "B", "W")
Part = tuple[str, int]  # a kind of program and its stage


@dataclass(frozen=True)
class Stages:
    count: int
    programs: Mapping[Part, Trace]  # inputs and outputs are values of the joint program
    sends: Mapping[tuple[str, int, int], tuple[Value, ...]]  # (kind of the sender, from, to) -> what goes there
    costs: tuple[float, ...]  # of each stage's forward
    home: Mapping[Value, int]  # the stage of each gradient and result
    readers: Mapping[Value, tuple[int, ...]]  # of each weight, the stages that read it
    drawn: Trace | None = None  # what is drawn at random for a microbatch

    def sent(self, kind: str, stage: int) -> list[tuple[int, tuple[Value, ...]]]:
        """What a program sends when it is done, and where."""
        return [(to, values) for (k, start, to), values in self.sends.items() if (k, start) == (kind, stage)]


def cut(
    joint: Joint,
    count: int,
    weights: Collection[Value] | None = None,
    where: Where | None = None,
    again: Mapping[Equation, Equation] | None = None,
    split: bool = True,
) -> Stages:
    """weights   inputs that not all ranks have; other inputs are everywhere
    again     of equations of backward, those of the forward that they repeat
    split     gradients of weights are made apart
    """
    trace = joint.trace
    if trace.symbols:
        raise OptionError("pipeline: expected sizes that are numbers, got a program with symbolic ones")
    chosen = set(joint.wrt if weights is None else weights) | set(trace.mutations)
    return _Cut(joint, count, _Kinds(joint, chosen), where or Where(), again or {}, split).stages()


class _Kinds:
    """Equations by where they may stand."""

    def __init__(self, joint: Joint, weights: set[Value]) -> None:
        trace = joint.trace
        self.weights, self.trace = weights, trace
        self.anywhere: set[Equation] = set()  # every program does them for itself
        self.drawn: set[Equation] = set()
        self.of_weights: list[Equation] = []
        self.work: list[Equation] = []
        given_back = {*values_in(trace.outputs), *trace.mutations.values()}
        nothing, random, held = set(trace.constants), set[Value](), weights - set(trace.mutations)
        for eqn in trace.equations[: joint.split]:
            inputs, free = eqn.inputs(), _free(eqn)
            kept = any(v in given_back for v in eqn.results())
            drawing = draws(eqn.op, eqn.args, eqn.kwargs)
            of_random = free and any(v in random for v in inputs)
            if not kept and all(v in nothing or v in random for v in inputs) and (drawing or of_random):
                self.drawn.add(eqn)
                random.update(eqn.results())
            elif kept or has_effect(eqn):
                self.work.append(eqn)
            elif all(v in nothing for v in inputs):
                self.anywhere.add(eqn)
                nothing.update(eqn.results())
            elif all(v in nothing or v in held for v in inputs):
                self.of_weights.append(eqn)
                held.update(eqn.results())
            else:
                self.work.append(eqn)
        self.work = self._written_early(self.work)
        self.backward: list[Equation] = []
        for eqn in trace.equations[joint.split :]:
            own = not has_effect(eqn) and not any(v in given_back for v in eqn.results())
            if own and all(v in nothing for v in eqn.inputs()):
                nothing.update(eqn.results())
                self.anywhere.add(eqn)
            elif own and _free(eqn):
                self.anywhere.add(eqn)
            else:
                self.backward.append(eqn)

    def _written_early(self, work: list[Equation]) -> list[Equation]:
        """What leads to the new content of an input alone comes right behind what it reads: with that on one stage."""
        mutated, read = set(self.trace.mutations.values()), set(values_in(self.trace.outputs))
        leads: set[Equation] = set()
        for eqn in reversed(work):
            if not has_effect(eqn) and read.isdisjoint(eqn.results()) and not mutated.isdisjoint(eqn.results()):
                leads.add(eqn)
                mutated.update(eqn.inputs())
            else:
                read.update(eqn.inputs())
        place: dict[Value, int] = {}
        keys: dict[Equation, int] = {}
        for i, eqn in enumerate(work):
            behind = [place[v] for v in eqn.inputs() if v in place]
            keys[eqn] = max(behind) if eqn in leads and behind else i
            place.update(dict.fromkeys(eqn.results(), keys[eqn]))
        return sorted(work, key=keys.__getitem__)


def _free(eqn: Equation) -> bool:
    declared = rules(eqn.op)
    return is_view(eqn.op) or (declared is not None and declared.free)


class _Cut:
    def __init__(
        self, joint: Joint, count: int, kinds: _Kinds, where: Where, again: Mapping[Equation, Equation], split: bool
    ) -> None:
        self.trace, self.count, self.kinds, self.split = joint.trace, count, kinds, split
        self.maker = self.trace.makers()
        self.at: dict[Equation, tuple[int, ...]] = {}  # the stages that an equation stands on
        placed = where.homes or {}
        read = [self.weights_of(eqn) | {v for v in eqn.results() if v in placed} for eqn in kinds.work]
        stage_of = stages_of(kinds.work, read, count, where, self.inside_writes())
        self.before_writes(stage_of)
        self.at |= {eqn: (stage,) for eqn, stage in stage_of.items()}
        self.spread()
        self.there: dict[Value, set[int]] = {}  # the stages whose forward has a value
        for eqn in (*kinds.work, *kinds.of_weights):
            for v in (*eqn.results(), *self.roots(eqn)):
                if v not in self.trace.inputs or v in kinds.weights:
                    self.there.setdefault(v, set()).update(self.at[eqn])
        self.costs = [sum(cost_of(e) for e, s in stage_of.items() if s == k) for k in range(count)]
        self.late = dict.fromkeys(self.trace.inputs[len(self.trace.inputs) - len(joint.pulled) :], count - 1)
        self.bound = self.bounds(joint)
        self.first: dict[Value, Value] = {}  # of what backward computes again, what the forward computed
        for eqn in kinds.backward:
            self.at[eqn] = self.at[again[eqn]] if again.get(eqn) in self.at else (self.place(eqn),)
            if again.get(eqn) in self.at:
                pairs = zip(eqn.outputs, again[eqn].outputs, strict=True)
                self.first |= {a: b for a, b in pairs if a is not None and b is not None}
        self.trim()

    # --- who reads what ---

    def roots(self, eqn: Equation, stage: int | None = None) -> list[Value]:
        """What an equation reads, seen through what every program does for itself. On a stage that does not compute it
        again, it reads what the forward computed."""
        return [v for v in dict.fromkeys(self._roots(eqn, stage)) if v not in self.trace.constants]

    def _roots(self, eqn: Equation, stage: int | None) -> Iterator[Value]:
        for v in eqn.inputs():
            maker = self.maker.get(v)
            if maker is not None and maker in self.kinds.anywhere:
                yield from self._roots(maker, stage)
            else:
                yield self.seen(v, stage)

    def seen(self, v: Value, stage: int | None) -> Value:
        if stage is None or v not in self.first or stage in self.at[self.maker[v]]:
            return v
        return self.first[v]

    def weights_of(self, eqn: Equation) -> set[Value]:
        """The weights that an equation reads, as they are or as what is made of them alone."""
        read: set[Value] = set()
        for v in self.roots(eqn):
            maker = self.maker.get(v)
            if v in self.kinds.weights:
                read.add(v)
            elif maker is not None and maker in self.kinds.of_weights:
                read |= self.weights_of(maker)
        return read

    # --- where equations stand ---

    def spread(self) -> None:
        """What is made of weights alone stands on all stages that read it."""
        wanted: dict[Value, set[int]] = {}
        for eqn in self.kinds.work:
            for v in self.roots(eqn):
                wanted.setdefault(v, set()).update(self.at[eqn])
        for eqn in reversed(self.kinds.of_weights):
            stages = {s for v in eqn.results() for s in wanted.get(v, ())} or {self.count - 1}
            self.at[eqn] = tuple(sorted(stages))
            for v in self.roots(eqn):
                wanted.setdefault(v, set()).update(stages)

    def inside_writes(self) -> set[int]:
        """Of the forward's equations, those between the first that reads an input and the one that writes it."""
        place = {eqn: i for i, eqn in enumerate(self.kinds.work)}
        written = {t: place[self.maker[v]] for t, v in self.trace.mutations.items() if self.maker.get(v) in place}
        inside: set[int] = set()
        for eqn, i in place.items() if written else ():
            for v in self.roots(eqn):
                if v in written:
                    inside.update(range(min(i, written[v]) + 1, max(i, written[v]) + 1))
        return inside

    def before_writes(self, stage_of: dict[Equation, int]) -> None:
        """Who reads an input that a stage writes stands on that stage."""
        homes = {t: stage_of[self.maker[v]] for t, v in self.trace.mutations.items() if self.maker.get(v) in stage_of}
        for eqn, stage in stage_of.items():
            for v in self.roots(eqn):
                if homes.get(v, stage) != stage:
                    if any(x in e.inputs() for e in stage_of for x in eqn.results()):
                        raise OptionError(
                            f"pipeline: {v.name} is read on stage {stage} at {eqn.source} and written on stage "
                            f"{homes[v]}; expected one stage that does both: cut the model elsewhere"
                        )
                    stage_of[eqn] = homes[v]

    def trim(self) -> None:
        """What is computed again stands only where somebody reads it."""
        wanted: dict[Value, set[int]] = {}
        for eqn in reversed(self.kinds.backward):
            if any(v in self.first for v in eqn.results()):
                read = {s for v in eqn.results() for s in wanted.get(v, ())}
                self.at[eqn] = tuple(s for s in self.at[eqn] if s in read)
            for v in self.roots(eqn):
                wanted.setdefault(v, set()).update(self.at[eqn])

    def bounds(self, joint: Joint) -> dict[Value, int]:
        """What only leads from cotangents to gradients of weights: the last stage that reads one of them."""
        bound: dict[Value, int] = {}
        for w, grad in zip(joint.wrt, self.trace.outputs[len(self.trace.outputs) - len(joint.wrt) :], strict=True):
            if isinstance(grad, Value):
                bound[grad] = max(bound.get(grad, 0), max(self.there.get(w, ()), default=self.count - 1))
        for eqn in reversed(self.kinds.backward):
            free = not any(v in self.there for v in self.roots(eqn))
            last = max((bound.get(v, 0) for v in eqn.results()), default=0) if free else self.count - 1
            for v in self.roots(eqn):
                bound[v] = max(bound.get(v, 0), last)
        return bound

    def place(self, eqn: Equation) -> int:
        roots = [self.first.get(v, v) for v in self.roots(eqn)]
        latest = min((self.late[v] for v in roots if v in self.late), default=self.count - 1)
        held = [self.there[v] for v in roots if v in self.there]
        if not held:
            latest = min(latest, max((self.bound.get(v, 0) for v in eqn.results()), default=latest))
        everywhere = [s for s in range(latest + 1) if all(s in stages for stages in held)]
        stage = everywhere[-1] if everywhere else min(latest, *(max(stages) for stages in held))
        self.late.update(dict.fromkeys(eqn.results(), stage))
        return stage

    def split_backward(self) -> dict[tuple[Equation, int], str]:
        """What earlier stages wait for comes first; the rest makes gradients of weights."""
        kinds: dict[tuple[Equation, int], str] = {}
        needed: set[tuple[Value, int]] = set()
        late = set(self.kinds.backward)
        for eqn in reversed(self.kinds.backward):
            for stage in self.at[eqn]:
                first = not self.split or any((v, stage) in needed for v in eqn.results())
                kind = kinds[eqn, stage] = "B" if first else "W"
                for v in self.roots(eqn, stage):
                    maker = self.maker.get(v)
                    if maker in late and (stage not in self.at[maker] or kind == "B"):
                        needed.add((v, stage if stage in self.at[maker] else self.at[maker][-1]))
        return kinds

    # --- programs ---

    def stages(self) -> Stages:
        kinds = self.split_backward()
        parts: dict[Part, list[Equation]] = {(k, s): [] for k in KINDS for s in range(self.count)}
        makers: dict[Value, dict[int, str]] = {}  # the stages that compute a value, and in which program
        for eqn in self.trace.equations:
            for stage in self.at.get(eqn, ()):
                kind = kinds.get((eqn, stage), "F")
                parts[kind, stage].append(eqn)
                for v in eqn.results():
                    makers.setdefault(v, {})[stage] = kind
        reads = {part: self.read(equations, part[1]) for part, equations in parts.items()}
        sends = self.sends(reads, makers)
        wanted = {v for values in reads.values() for v in values} | set(values_in(self.trace.outputs))
        programs = {part: self.program(part, parts[part], reads[part], wanted) for part in parts}
        outputs = [v for v in self.trace.outputs if isinstance(v, Value)]
        home = {v: next(iter(makers[v])) for v in outputs if v in makers}
        readers: dict[Value, list[int]] = {v: [] for v in self.trace.inputs if v in self.kinds.weights}
        for (_, stage), values in reads.items():
            for v in values:
                if v in readers and stage not in readers[v]:
                    readers[v].append(stage)
        used = {v: tuple(sorted(stages)) for v, stages in readers.items()}
        return Stages(self.count, programs, sends, tuple(self.costs), home, used, self.draws(wanted))

    def sends(
        self, reads: Mapping[Part, Sequence[Value]], makers: Mapping[Value, Mapping[int, str]]
    ) -> dict[tuple[str, int, int], tuple[Value, ...]]:
        sends: dict[tuple[str, int, int], list[Value]] = {}
        for (_, to), values in reads.items():
            for v in values:
                if v not in makers or to in makers[v]:
                    continue
                start = max((s for s in makers[v] if s < to), default=min(makers[v]))
                way = ("F" if makers[v][start] == "F" and start < to else "B", start, to)
                assert way[0] == "F" or to < start, f"{v.name} would go from stage {start} on to {to} in backward"
                if v not in sends.setdefault(way, []):
                    sends[way].append(v)
        return {way: tuple(values) for way, values in sends.items()}

    def read(self, equations: Sequence[Equation], stage: int) -> list[Value]:
        """What a program is given."""
        own = {v for e in equations for v in e.results()}
        values = dict.fromkeys(v for e in equations for v in self.roots(e, stage) if v not in own)
        for e in equations:
            values |= {t: None for t, v in self.trace.mutations.items() if v in e.results()}
        return list(values)

    def program(self, part: Part, equations: list[Equation], reads: list[Value], wanted: Collection[Value]) -> Trace:
        again = self.again(equations)
        every = [e for e in self.trace.equations if e in again or e in set(equations)]
        own = [v for e in equations for v in e.results()]
        elsewhere = {v: first for v, first in self.first.items() if self.seen(v, part[1]) is first}
        every = [e.substitute(elsewhere) for e in every]
        return self.trace_of(f"{self.trace.name}_{part[0]}{part[1]}", reads, every, [v for v in own if v in wanted])

    def trace_of(self, name: str, reads: Sequence[Value], equations: list[Equation], outputs: list[Value]) -> Trace:
        own = {v for e in equations for v in e.results()}
        mutations = {t: v for t, v in self.trace.mutations.items() if v in own}
        constants = {v: x for v, x in self.trace.constants.items() if any(v in e.inputs() for e in equations)}
        return Trace(name, tuple(reads), tuple(equations), tuple(outputs), mutations, constants, {})

    def draws(self, wanted: Collection[Value]) -> Trace | None:
        equations = [e for e in self.trace.equations if e in self.kinds.drawn]
        if not equations:
            return None
        outputs = [v for e in equations for v in e.results() if v in wanted]
        every = [e for e in self.trace.equations if e in self.again(equations) or e in self.kinds.drawn]
        return self.trace_of(f"{self.trace.name}_draws", (), every, outputs)

    def again(self, equations: Sequence[Equation]) -> set[Equation]:
        """What is done again for these equations."""
        chosen: set[Equation] = set()
        left = [v for e in equations for v in e.inputs()]
        while left:
            maker = self.maker.get(left.pop())
            if maker is not None and maker in self.kinds.anywhere and maker not in chosen:
                chosen.add(maker)
                left += maker.inputs()
        return chosen
