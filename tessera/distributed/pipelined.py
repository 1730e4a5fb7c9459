"""Pipelines run in one process: every stage has values of its own, and gets others only where they are sent.

In: the programs of stages, a schedule, weights, microbatches. Out: results of each microbatch and sums of gradients, in
the order in which stages make them. `execute` runs one program: `interp.run`, or, where the other axes of a mesh have
ranks too, `in_step.run` on parts. A value that no message brings is missed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tessera.ir.equation import Value
from tessera.transforms.pipelined.cut import Stages
from tessera.transforms.pipelined.schedule import Action, Schedule
from tessera.util.errors import InputError

Env = dict[Value, object]


class Run:
    def __init__(self, stages: Stages, schedule: Schedule, execute: Callable, add: Callable) -> None:
        if schedule.stages != stages.count:
            raise InputError(f"expected a schedule of {stages.count} stages, got one of {schedule.stages}")
        self.stages, self.schedule, self.execute, self.add = stages, schedule, execute, add
        self.held: dict[tuple[int, int], Env] = {}  # of a stage and a microbatch

    def __call__(
        self, weights: Mapping[Value, object], batches: Sequence[Mapping[Value, object]], grads: Sequence[Value]
    ) -> tuple[list[Env], Env]:
        """Results of each microbatch by value, and the sums of `grads`."""
        results: list[Env] = [{} for _ in batches]
        sums: Env = {}
        timed = sorted((t for row in self.schedule.timed() for t in row), key=lambda t: (t.end, t.action.stage))
        for action in (t.action for t in timed):
            for kind in ("B", "W") if action.kind == "B" and not self.schedule.split else action.kind:
                made = self.do(Action(kind, action.microbatch, action.stage), {**weights, **batches[action.microbatch]})
                for v, x in made.items():
                    if v in grads:
                        sums[v] = self.add(sums[v], x) if v in sums else x
                    elif v in self.stages.home:
                        results[action.microbatch][v] = x
        return results, sums

    def do(self, action: Action, given: Mapping[Value, object]) -> Env:
        """One action: run the program, keep what it made, send what others wait for."""
        stage, microbatch = action.stage, action.microbatch
        program, held = self.stages.programs[action.kind, stage], self.held.setdefault((stage, microbatch), {})
        if not program.equations:
            return {}
        args = [held[v] if v in held else given[v] for v in program.inputs]
        made = dict(zip(program.outputs, self.execute(program, args), strict=True))
        held.update(made)  # type: ignore[arg-type]
        for to, values in self.stages.sent(action.kind, stage):
            self.held.setdefault((to, microbatch), {}).update({v: held[v] for v in values})
        return made  # type: ignore[return-value]
