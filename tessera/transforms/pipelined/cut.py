"""Cuts a differentiated program into the stages of a pipeline.

In: a `Joint` (whole, or one rank's of the other axes), a number of stages. Out: `Stages`: for each stage three programs
(forward; the part of backward that earlier stages wait for; the part that makes gradients of weights) and the values
that stages send each other. Every equation stands in one of them, except views of the backward and what is made
from nothing, which stand wherever they are read. Run in any order that a schedule allows, they compute what the joint
program computes, bit for bit.

The forward is cut in order, by cost; near the best place the one where the fewest bytes cross is taken. An equation of
the backward stands on the last stage that has the values of the forward it reads, and no later than its cotangents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tessera.ir.equation import Equation, Value, values_in
from tessera.ir.schema import has_effect, is_view
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops.op import bytes_moved, flops, rules
from tessera.transforms.vjp import Joint
from tessera.util.errors import OptionError

NEAR = 0.2  # of a stage's cost: how far from the best place a cut may be moved for fewer bytes
BYTE = 100.0  # operations that a device does while it moves a byte
KINDS = ("F", "B", "W")
Part = tuple[str, int]  # a kind of program and its stage


@dataclass(frozen=True)
class Stages:
    count: int
    programs: Mapping[Part, Trace]  # inputs and outputs are values of the joint program
    sends: Mapping[tuple[str, int, int], tuple[Value, ...]]  # (kind of the sender, from, to) -> what goes there
    costs: tuple[float, ...]  # of each stage's forward
    home: Mapping[Value, int]  # the stage of each gradient and result

    def sent(self, kind: str, stage: int) -> list[tuple[int, tuple[Value, ...]]]:
        """What a program sends when it is done, and where."""
        return [(to, values) for (k, start, to), values in self.sends.items() if (k, start) == (kind, stage)]


def cut(joint: Joint, count: int) -> Stages:
    trace = joint.trace
    if trace.symbols:
        raise OptionError("pipeline: expected sizes that are numbers, got a program with symbolic ones")
    forward, backward = trace.equations[: joint.split], trace.equations[joint.split :]
    replayed = _replayed(trace, forward, backward)
    work = [e for e in forward if e not in replayed]
    stage_of = _by_cost(work, count, trace)
    return _Cut(joint, count, replayed, stage_of, backward).stages()


def _replayed(trace: Trace, forward: Sequence[Equation], backward: Sequence[Equation]) -> set[Equation]:
    """Equations that every program does for itself: made from nothing, or views that backward takes."""
    chosen: set[Equation] = set()
    from_nothing: set[Value] = set(trace.constants)
    given_back = {*values_in(trace.outputs), *trace.mutations.values()}
    late = set(backward)
    for eqn in (*forward, *backward):
        if has_effect(eqn) or any(v in given_back for v in eqn.results()):
            continue
        declared = rules(eqn.op)
        view = is_view(eqn.op) or (declared is not None and declared.free)
        if all(v in from_nothing for v in eqn.inputs()):
            from_nothing.update(eqn.results())
            chosen.add(eqn)
        elif view and eqn in late:
            chosen.add(eqn)
    return chosen


def _by_cost(work: Sequence[Equation], count: int, trace: Trace) -> dict[Equation, int]:
    """The stage of each equation of the forward."""
    if count > len(work):
        raise OptionError(f"pipeline: expected at most {len(work)} stages, as many as there is work for, got {count}")
    costs = [flops(e) + BYTE * bytes_moved(e) for e in work]
    sums = list(accumulate(costs, initial=0.0))
    crossing = _crossing(work, trace)
    cuts = [0]
    for k in range(1, count):
        ideal, slack = sums[-1] * k / count, sums[-1] / count * NEAR
        places = [i for i in range(cuts[-1] + 1, len(work) - (count - k) + 1)]
        near = [i for i in places if abs(sums[i] - ideal) <= slack] or [min(places, key=lambda i: abs(sums[i] - ideal))]
        cuts.append(min(near, key=lambda i: (crossing[i], abs(sums[i] - ideal))))
    cuts.append(len(work))
    return {work[i]: k for k in range(count) for i in range(cuts[k], cuts[k + 1])}


def _crossing(work: Sequence[Equation], trace: Trace) -> list[int]:
    """For a cut before each equation, the bytes of what is made before and read after it."""
    made, last = dict[Value, int](), dict[Value, int]()
    for i, eqn in enumerate(work):
        made.update(dict.fromkeys(eqn.results(), i))
        last.update(dict.fromkeys(eqn.inputs(), i))
    steps = [0] * (len(work) + 1)
    for v, i in made.items():
        if v in last and isinstance(v.type, TensorType):
            steps[i + 1] += v.nbytes()
            steps[last[v] + 1] -= v.nbytes()
    return list(accumulate(steps))


class _Cut:
    def __init__(
        self,
        joint: Joint,
        count: int,
        replayed: set[Equation],
        stage_of: dict[Equation, int],
        backward: Sequence[Equation],
    ) -> None:
        self.trace, self.count, self.replayed = joint.trace, count, replayed
        self.maker = self.trace.makers()
        self.forward = dict(stage_of)
        self.costs = [0.0] * count
        for eqn, stage in stage_of.items():
            self.costs[stage] += flops(eqn) + BYTE * bytes_moved(eqn)
        self.there: dict[Value, set[int]] = {}  # the stages whose forward has a value
        for eqn, stage in stage_of.items():
            for v in (*eqn.results(), *self.roots(eqn)):
                self.there.setdefault(v, set()).add(stage)
        self.late = dict.fromkeys(self.trace.inputs[len(self.trace.inputs) - len(joint.pulled) :], count - 1)
        self.backward = {e: self.place(e) for e in backward if e not in replayed}
        self.grads = [v for v in self.trace.outputs if isinstance(v, Value)]

    def roots(self, eqn: Equation) -> list[Value]:
        """What an equation reads, seen through what is done again wherever it is read."""
        found: list[Value] = []
        for v in eqn.inputs():
            maker = self.maker.get(v)
            found += self.roots(maker) if maker in self.replayed and maker is not None else [v]
        return [v for v in dict.fromkeys(found) if v not in self.trace.constants]

    def place(self, eqn: Equation) -> int:
        roots = self.roots(eqn)
        latest = min((self.late[v] for v in roots if v in self.late), default=self.count - 1)
        held = [self.there[v] for v in roots if v in self.there]
        everywhere = [s for s in range(latest + 1) if all(s in stages for stages in held)]
        stage = everywhere[-1] if everywhere else min(latest, *(max(stages) for stages in held))
        self.late.update(dict.fromkeys(eqn.results(), stage))
        return stage

    def stages(self) -> Stages:
        parts: dict[Equation, Part] = {e: ("F", s) for e, s in self.forward.items()}
        parts |= self.split_backward()
        home = {v: parts[self.maker[v]] for e in parts for v in e.results()}
        programs: dict[Part, list[Equation]] = {(k, s): [] for k in KINDS for s in range(self.count)}
        for eqn in self.trace.equations:
            if eqn in parts:
                programs[parts[eqn]].append(eqn)
        reads = {part: self.read(equations) for part, equations in programs.items()}
        sends: dict[tuple[str, int, int], list[Value]] = {}
        for (_, to), values in reads.items():
            for v in values:
                if v in home and home[v][1] != to:
                    kind, start = home[v]
                    way = ("F" if kind == "F" and start < to else "B", start, to)
                    assert way[0] == "F" or to < start, f"{v.name} would go from stage {start} on to {to} in backward"
                    if v not in sends.setdefault(way, []):
                        sends[way].append(v)
        wanted = {v for values in reads.values() for v in values} | set(values_in(self.trace.outputs))
        made = {part: self.program(part, programs[part], reads[part], wanted) for part in programs}
        results = {v: home[v][1] for v in self.grads if v in home}
        return Stages(self.count, made, {k: tuple(v) for k, v in sends.items()}, tuple(self.costs), results)

    def split_backward(self) -> dict[Equation, Part]:
        """What earlier stages wait for comes first; the rest makes gradients of weights."""
        parts: dict[Equation, Part] = {}
        needed: set[Value] = set()
        for eqn, stage in reversed(self.backward.items()):
            if any(v in needed for v in eqn.results()):
                parts[eqn] = ("B", stage)
            else:
                parts[eqn] = ("W", stage)
            for v in self.roots(eqn):
                maker = self.maker.get(v)
                if maker in self.backward and (self.backward[maker] != stage or parts[eqn][0] == "B"):
                    needed.add(v)
        return parts

    def read(self, equations: Sequence[Equation]) -> list[Value]:
        """What a program is given."""
        own = {v for e in equations for v in e.results()}
        values = dict.fromkeys(v for e in equations for v in self.roots(e) if v not in own)
        for e in equations:
            values |= {t: None for t, v in self.trace.mutations.items() if v in e.results()}
        return list(values)

    def program(self, part: Part, equations: list[Equation], reads: list[Value], wanted: Iterable[Value]) -> Trace:
        again = self.again(equations)
        every = [e for e in self.trace.equations if e in again or e in set(equations)]
        own = [v for e in equations for v in e.results()]
        wants = set(wanted)
        return Trace(
            f"{self.trace.name}_{part[0]}{part[1]}",
            tuple(reads),
            tuple(every),
            tuple(v for v in own if v in wants),
            {t: v for t, v in self.trace.mutations.items() if v in own},
            {v: x for v, x in self.trace.constants.items() if any(v in e.inputs() for e in every)},
            {},
        )

    def again(self, equations: Sequence[Equation]) -> set[Equation]:
        """What is done again for these equations."""
        chosen: set[Equation] = set()
        left = [v for e in equations for v in e.inputs()]
        while left:
            maker = self.maker.get(left.pop())
            if maker in self.replayed and maker is not None and maker not in chosen:
                chosen.add(maker)
                left += maker.inputs()
        return chosen
