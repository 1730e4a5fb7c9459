"""The programs of a training step on one rank of a pipeline.

In: a captured loss over a microbatch, where everything lies, a schedule, an optimizer's plan. Out: a compilation. The
loss is differentiated, partitioned over the other axes and split into halves as any training program; both halves
together are cut into stages. Only the programs of this rank's stages are compiled, and the update of the weights whose
gradients they make. What ranks tell each other beside the schedule stands between programs: the norms of all gradients,
which clipping needs, are an input of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tessera.distributed.capture import Forward
from tessera.distributed.plan import Layout as Lies
from tessera.frontends.captured import Captured
from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Value
from tessera.ir.trace import Trace
from tessera.optim.updates import Extra, norm_dtype, stacked_norms
from tessera.pipeline.account import Account, Program
from tessera.pipeline.executable import Ends, Executable
from tessera.pipeline.lists import PIPELINES, SPLIT, claiming
from tessera.pipeline.options import Options
from tessera.pipeline.run import Edits, Run
from tessera.pipeline.sharded import DIFFERENTIATED, finishing, in_pieces
from tessera.pipeline.stage import PROGRAM
from tessera.runtime.call import Layout
from tessera.training.program import joined, renamed, seeded
from tessera.training.sharded_program import Recipe, ShardedCompilation, ShardedStepRun
from tessera.transforms.pipelined.cut import KINDS, Part, Stages, cut
from tessera.transforms.pipelined.orders import Step, orders
from tessera.transforms.pipelined.places import Held, Where
from tessera.transforms.pipelined.schedule import Schedule
from tessera.transforms.remat import Split
from tessera.transforms.shard.joint import Partition
from tessera.transforms.vjp import Joint

PIPELINES["pipelined step"] = [*DIFFERENTIATED, *SPLIT]
PIPELINES["part of a pipeline"] = [in_pieces(PROGRAM), *claiming(PROGRAM), *finishing(PROGRAM)]


@dataclass(frozen=True)
class Piped:
    """What a pipeline adds to a step's recipe."""

    schedule: Schedule
    rank: int  # this one's place along the axis
    starts: Sequence[str] = ()  # the modules that stages begin with
    homes: Mapping[str, Held] | None = None  # who has each weight already
    settle: Callable[[Mapping[str, Held]], None] = lambda held: None  # told who has each weight


class PipelinedRun(ShardedStepRun):
    """A captured loss on its way to the stages of a pipeline."""

    of: PipelinedCompilation

    def begin(self, grad: bool) -> None:
        super().begin(grad)
        self.kind = "pipelined step"

    def backward_of(self, split: Split) -> Trace:
        scale = self.of.recipe.scale / self.of.piped.schedule.microbatches
        return seeded(split.backward, self.joint, scale)

    def halves_together(self) -> tuple[Joint, dict[Equation, Equation]]:
        """Forward and backward as one program, and which equations of backward repeat which of the forward."""
        forward, backward = self.halves.forward, self.halves.backward
        links = dict(zip(self.halves.saved, forward.outputs[len(self.results) :], strict=True))
        backward = renamed(backward, {a: b for a, b in links.items() if a is not b and isinstance(b, Value)})
        trace = joined(forward, backward, len(self.results), self.name)
        first = {v.name: eqn for eqn in forward.equations for v in eqn.results()}
        late = trace.equations[len(forward.equations) :]
        again = {
            new: first[old.results()[0].name]
            for new, old in zip(late, backward.equations, strict=True)
            if old.results() and old.results()[0].name in first
        }
        return Joint(trace, self.joint.wrt, (), len(forward.equations), ()), again

    def cut(self) -> Stages:
        """The stages, of which each value is one of this rank's programs."""
        piped, forward = self.of.piped, self.of.forward
        inputs = self.joint.trace.inputs
        self.weights = dict(zip(forward.weights, inputs, strict=False))
        rest = inputs[len(self.weights) :]
        self.buffers = dict(zip(forward.buffers, rest, strict=False))
        self.batch = rest[len(self.buffers) : len(self.buffers) + len(forward.batch)]
        joint, again = self.halves_together()
        count = len(joint.trace.outputs) - len(self.joint.wrt)
        self.grads = {
            name: grad
            for name, grad in zip(self.of.trained_names, joint.trace.outputs[count:], strict=True)
            if isinstance(grad, Value)
        }
        self.outputs = joint.trace.outputs[:count]
        stages = cut(joint, piped.schedule.stages, self.weights.values(), self.where(), again, piped.schedule.split)
        for part, trace in stages.programs.items():
            self.keep(_title(part), trace)
        return stages

    def where(self) -> Where:
        piped = self.of.piped
        if piped.homes is not None:
            return Where(homes={self.weights[name]: held.stages for name, held in piped.homes.items()})
        inside = [[v for n, v in self.weights.items() if f"{n}.".startswith(f"{at}.")] for at in piped.starts]
        return Where(starts=inside)

    def held(self, stages: Stages) -> dict[str, Held]:
        on, held = self.of.piped.schedule.home, {}
        for name, v in self.weights.items():
            readers = {on[s] for s in stages.readers[v]}
            owner = on[stages.home[self.grads[name]]] if name in self.grads else min(readers, default=0)
            held[name] = Held(owner, tuple(sorted(readers | {owner})), stages.readers[v])
        return held

    def norms(self, names: Sequence[str], dtype: torch.dtype) -> Trace:
        """The norm of each of these gradients, on one rank of the other axes."""
        lies, builder = self.of.lies, Builder("norms")
        values = [builder.input(f"{n.replace('.', '_')}_grad", self.of.forward.weights[n].tensor) for n in names]
        with builder:
            whole = builder.finish([stacked_norms(values, dtype)])
        pins = {v: lies.grads[n] for v, n in zip(whole.inputs, names, strict=True)}
        return self.partition.of(whole, pins).trace


class PartRun(Run):
    """One program of a pipeline on its way to what runs."""

    def __init__(self, title: str, trace: Trace, options: Options, ways: Mapping[str, str] | None = None) -> None:
        self.title, self.trace, self.ways = title, trace, ways or {}
        super().__init__(trace.name, None, options, False, (), {})  # type: ignore[arg-type]

    def begin(self, _: bool) -> None:
        self.traces[PROGRAM], self.kind = self.trace, "part of a pipeline"

    def compiled(self, account: Account) -> Program:
        """The program; what its stages did is put down in the account of all."""
        self.go()
        program = self.program(self.title, self.traces[PROGRAM])
        account.stages += [(f"{self.title} {name}", trace) for name, trace in self.account.stages]
        account.claims += self.account.claims
        account.in_pieces += self.account.in_pieces
        account.to_claim += self.account.to_claim
        account.programs.append(program)
        return program


class PipelineExecutable(Executable):
    """Programs that a schedule calls, each many times a step."""

    def __init__(self, programs: list[Program], extras: tuple[Extra, ...]) -> None:
        self.ends, self.extras = Ends(Layout(()), None, ()), extras
        self.eager = self.derivative = self.call = _never
        self.enables_grad, self.reads = False, ()
        self.cuda_graph = "no CUDA graph: a pipeline waits for other ranks between its programs"


class PipelinedCompilation(ShardedCompilation):
    """One rank's programs of a step."""

    kinds = ("pipelined step", "part of a pipeline")
    stages: Stages
    steps: tuple[Step, ...]
    run: PipelinedRun
    held: dict[str, Held]
    own: list[str]  # the weights that this rank updates

    def __init__(
        self,
        name: str,
        forward: Forward,
        partition: Partition,
        lies: Lies,
        recipe: Recipe,
        piped: Piped,
        options: Options,
    ) -> None:
        self.piped = piped
        super().__init__(name, forward, partition, lies, recipe, options)

    def through(self, captured: Captured, edits: Edits) -> tuple[PipelineExecutable, Account]:  # type: ignore[override]
        run = self.run = PipelinedRun(self, captured, edits)
        run.go()
        self.stages = run.cut()
        self.rows = orders(self.piped.schedule, self.stages)
        self.steps = self.rows[self.piped.rank]
        self.held, self.with_grads = run.held(self.stages), list(run.grads)
        self.piped.settle(self.held)
        pipe = self.lies.plan.pipe
        run.account.pipeline, run.account.pipeline_axis = told(self), "" if pipe is None else pipe.axis
        self.parts: dict[Part, Program] = {}
        for kind, stage in ((k, s) for s in range(self.stages.count) for k in KINDS):
            if self.piped.schedule.home[stage] == self.piped.rank and self.stages.programs[kind, stage].equations:
                self.parts[kind, stage] = self.compiled_part((kind, stage), run.account)
        self.draws = None
        if self.stages.drawn is not None:
            self.draws = PartRun("draws", self.stages.drawn, self.options).compiled(run.account)
        self.own = [name for name in self.with_grads if self.held[name][0] == self.piped.rank]
        self.update_of(self.own, run.account)
        outputs = run.split.forward.outputs[: self.forward.results]
        self.places, self.results = [run.results.index(v) for v in outputs], len(run.results)
        return PipelineExecutable(run.account.programs, self.update_extras), run.account

    def compiled_part(self, part: Part, account: Account) -> Program:
        ways = self.partition.ways
        return PartRun(_title(part), self.stages.programs[part], self.options, ways).compiled(account)

    def update_of(self, names: list[str], account: Account) -> None:
        """Clipping and update of the weights that a rank owns."""
        run, count = self.run, len(self.with_grads)
        self.plan = self.recipe.update(names)
        if "norm" in self.plan.clips:
            self.plan = replace(self.plan, norms=count)
        self.norm_dtype = norm_dtype(self.forward.weights[n].dtype for n in self.with_grads)
        self.norms = self.update = None
        self.update_extras: tuple[Extra, ...] = ()
        if not names:
            return
        if self.plan.norms is not None:
            trace = run.keep("norms", run.norms(names, self.norm_dtype))
            self.norms = PartRun("norms", trace, self.options).compiled(account)
        run.with_grads = names
        trace, self.update_extras = run.update(self.plan)
        self.written = set(trace.mutations)
        self.update = PartRun("update", trace, self.options).compiled(account)

    @property
    def extras(self) -> tuple[Extra, ...]:
        return self.update_extras


def _title(part: Part) -> str:
    return f"{part[0]}{part[1]}"


def told(of: PipelinedCompilation) -> tuple[str, ...]:
    """The pipeline in words: its table, and of each stage what it has, costs and sends."""
    schedule, stages = of.piped.schedule, of.stages
    lines = [
        *str(schedule).splitlines(),
        f"ranks do nothing for {schedule.bubble():.0%} of the time, if stages are equal",
    ]
    whole = sum(stages.costs) or 1.0
    for stage, cost in enumerate(stages.costs):
        names = [n for n, v in of.run.weights.items() if stage in stages.readers[v]]
        span = f"{names[0]} to {names[-1]}" if names else "no weights"
        sends = [
            f"{sum(v.nbytes() for v in values):,} bytes {'on' if to > start else 'back'} to stage {to}"
            for (_, start, to), values in stages.sends.items() if start == stage
        ]  # fmt: skip
        sent = f"; a microbatch sends {', '.join(sends)}" if sends else ""
        lines.append(f"stage {stage} on rank {schedule.home[stage]}: {span}, {cost / whole:.0%} of the work{sent}")
    for name, (owner, ranks, _) in of.held.items():
        if len(ranks) > 1:
            lines.append(f"{name} is on the ranks {', '.join(map(str, ranks))}; rank {owner} updates it")
    lines.append("exchanges along other axes are counted for one microbatch, and the update")
    return tuple(lines)


def _never(*_: object) -> object:
    raise AssertionError("the programs of a pipeline are called by its schedule")
