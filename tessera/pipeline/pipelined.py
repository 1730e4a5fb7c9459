"""Programs of a pipeline of ranks: a captured program is cut into stages, and a rank compiles those of its own.

In: a `Run` of a program on one rank of the other axes, and a schedule. Out: a `Pipeline`, which says which program runs
where, on which values, and what stages send each other; and each part as a compiled program. A program with gradients
is differentiated, partitioned over the other axes and split into halves as any training program; both halves together
are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tessera.distributed.capture import Forward
from tessera.distributed.channel import GroupChannel
from tessera.distributed.pipelined import Env
from tessera.ir.equation import Arg, Equation, Value, map_values, values_in
from tessera.ir.placement import Placement
from tessera.ir.trace import Trace
from tessera.pipeline.account import Account, Program
from tessera.pipeline.executable import Ends, Executable
from tessera.pipeline.lists import PIPELINES, SPLIT, claiming
from tessera.pipeline.options import Options
from tessera.pipeline.run import Edits, Run
from tessera.pipeline.sharded import DIFFERENTIATED, PARTITIONED, ShardedRun, digest_of, finishing, in_pieces
from tessera.pipeline.stage import BACKWARD, FORWARD, PROGRAM
from tessera.runtime.call import Layout
from tessera.transforms.join import joined, over, renamed
from tessera.transforms.pipelined.cut import KINDS, Part, Stages, cut
from tessera.transforms.pipelined.orders import Step, orders
from tessera.transforms.pipelined.places import Held, NoOtherPlace, Where
from tessera.transforms.pipelined.schedule import Schedule
from tessera.transforms.shard.joint import Partition
from tessera.transforms.vjp import Joint

PIPELINES["pipelined inference"] = PARTITIONED
PIPELINES["pipelined training"] = [*DIFFERENTIATED, *SPLIT]
PIPELINES["part of a pipeline"] = [in_pieces(PROGRAM), *claiming(PROGRAM), *finishing(PROGRAM)]


@dataclass(frozen=True)
class Piped:
    """What a pipeline adds to a program."""

    schedule: Schedule
    axis: str
    rank: int  # this one's place along the axis
    starts: Sequence[str] = ()  # the modules that stages begin with
    homes: Mapping[str, Held] | None = None  # who has each weight already
    settle: Callable[[Mapping[str, Held]], None] = lambda held: None  # told who has each weight
    kept: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # tensors of the batch that one stage has: which
    made: Mapping[int, int] = field(default_factory=dict)  # of results, the stage that shall make each


@dataclass(frozen=True)
class Pipeline:
    """A program cut into stages, and whose its values are."""

    stages: Stages
    rows: tuple[tuple[Step, ...], ...]  # what each rank does
    weights: dict[str, Value]
    buffers: dict[str, Value]
    batch: tuple[Value, ...]
    cotangents: dict[Value, Value]  # of results
    grads: dict[Value, Value]  # of inputs
    outputs: tuple[Arg, ...]
    held: dict[str, Held]

    @property
    def summed(self) -> list[Value]:
        """Gradients that are added up over microbatches. Those of rows are rows, and one may be both."""
        rows = {grad for v, grad in self.grads.items() if v in self.batch and v.ndim}
        return [grad for grad in self.grads.values() if grad not in rows]


def cut_run(run: ShardedRun, forward: Forward, piped: Piped) -> Pipeline:
    """What came through the stages of a program, cut."""
    joint, again = _forward_alone(run) if run.kind == run.plain_kind else _halves_together(run)
    inputs = joint.trace.inputs
    weights = dict(zip(forward.weights, inputs, strict=False))
    rest = inputs[len(weights) :]
    buffers = dict(zip(forward.buffers, rest, strict=False))
    batch = rest[len(buffers) : len(buffers) + len(forward.batch)]
    count = len(joint.trace.outputs) - len(joint.wrt)
    outputs = joint.trace.outputs[:count]
    grads = {v: g for v, g in zip(joint.wrt, joint.trace.outputs[count:], strict=True) if isinstance(g, Value)}
    schedule, kept = piped.schedule, {batch[i]: stages for i, stages in piped.kept.items()}
    given_by = {v: (stage,) for i, stage in piped.made.items() if isinstance(v := outputs[i], Value)}
    where = _where(weights, piped, {**kept, **given_by})
    stages, held = _cut_at_homes(
        lambda where: cut(joint, schedule.stages, [*weights.values(), *kept], where, again, schedule.split),
        where, lambda stages: _held(weights, grads, stages, piped), piped
    )  # fmt: skip
    for part, trace in stages.programs.items():
        if trace.equations:
            run.keep(title(part), trace)
    cotangents = dict(zip(joint.pulled, inputs[len(inputs) - len(joint.pulled) :], strict=True))
    return Pipeline(
        stages, orders(schedule, stages), weights, buffers, batch, cotangents, grads, outputs, held
    )  # fmt: skip


def _forward_alone(run: ShardedRun) -> tuple[Joint, dict[Equation, Equation]]:
    trace = run.traces[PROGRAM]
    return Joint(trace, (), (), len(trace.equations), ()), {}


def _halves_together(run: ShardedRun) -> tuple[Joint, dict[Equation, Equation]]:
    """Forward and backward as one program, and which equations of backward repeat which of the forward."""
    forward = over(run.traces[FORWARD], run.halves.forward.inputs)
    backward = over(run.traces[BACKWARD], run.halves.backward.inputs)
    links = dict(zip(run.halves.saved, forward.outputs[len(run.results) :], strict=True))
    backward = renamed(backward, {a: b for a, b in links.items() if a is not b and isinstance(b, Value)})
    trace = joined(forward, backward, len(run.results), run.name)
    first = {v.name: eqn for eqn in forward.equations for v in eqn.results()}
    again = {
        new: first[old.results()[0].name]
        for new, old in zip(trace.equations[len(forward.equations) :], backward.equations, strict=True)
        if old.results() and _repeats(old, first.get(old.results()[0].name))
    }
    own = len(run.joint.trace.inputs) - len(run.joint.pulled)
    inputs, cotangents = run.joint.trace.inputs[:own], run.joint.trace.inputs[own:]
    late = {ct: v for ct, v in zip(cotangents, run.joint.pulled, strict=True) if ct in trace.inputs}
    trace = trace.with_(inputs=(*inputs, *late))
    return Joint(trace, run.joint.wrt, tuple(late.values()), len(forward.equations), ()), again


def _repeats(eqn: Equation, first: Equation | None) -> bool:
    """Is it an equation of the forward again? An edited backward may have other values of such names."""
    return first is not None and eqn.op == first.op and _told(eqn) == _told(first)


def _told(eqn: Equation) -> str:
    return str(map_values((eqn.args, tuple(eqn.kwargs.items())), lambda v: v.name))


def _where(weights: Mapping[str, Value], piped: Piped, kept: Mapping[Value, tuple[int, ...]]) -> Where:
    if piped.homes is not None:
        return Where(homes={**{weights[name]: held.stages for name, held in piped.homes.items()}, **kept})
    return Where(starts=[[v for n, v in weights.items() if f"{n}.".startswith(f"{at}.")] for at in piped.starts])


def _held(weights: Mapping[str, Value], grads: Mapping[Value, Value], stages: Stages, piped: Piped) -> dict[str, Held]:
    """Who has each weight. Ranks that have it already keep it, whether this program reads it there or not."""
    on, held = piped.schedule.home, {}
    for name, v in weights.items():
        before = piped.homes[name] if piped.homes is not None else None
        stage = stages.home.get(grads[v]) if v in grads else None
        first = min(stages.readers[v], default=0) if stage is None else stage
        owner = on[first] if before is None or stage is not None else before.owner
        ranks = {*(on[s] for s in stages.readers[v]), owner, *(before.ranks if before is not None else ())}
        held[name] = Held(owner, tuple(sorted(ranks)), stages.readers[v])
    return held


def _cut_at_homes(
    cut: Callable[[Where], Stages], where: Where, held_by: Callable[[Stages], dict[str, Held]], piped: Piped
) -> tuple[Stages, dict[str, Held]]:
    """Where the fewest bytes cross, the gradient of a weight may come up on a rank that does not update it: then the
    next best place beside its stage is tried."""
    choices = [0] * (piped.schedule.stages - 1)
    first: tuple[Stages, dict[str, Held]] | None = None
    while True:
        try:
            stages = cut(replace(where, choices=choices))
        except NoOtherPlace:
            assert first is not None  # whoever settles says which weight it is
            return first
        held = held_by(stages)
        first = first or (stages, held)
        wrong = set[int]()
        for name, now in held.items() if piped.homes is not None else ():
            before = piped.homes[name]  # type: ignore[index]
            if now.owner != before.owner or now.ranks != before.ranks:
                near = {*before.stages, *now.stages, *_stages_on(piped.schedule, {now.owner, before.owner})}
                wrong.update(range(min(near), max(near)))
        if not wrong:
            return stages, held
        choices = [n + (k in wrong) for k, n in enumerate(choices)]


def _stages_on(schedule: Schedule, ranks: Collection[int]) -> list[int]:
    return [stage for stage, rank in schedule.home.items() if rank in ranks]


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


def compiled_part(
    pipeline: Pipeline, part: Part, options: Options, ways: Mapping[str, str], account: Account
) -> Program:
    return PartRun(title(part), pipeline.stages.programs[part], options, ways).compiled(account)


def own_parts(
    pipeline: Pipeline, piped: Piped, options: Options, ways: Mapping[str, str], account: Account
) -> dict[Part, Program]:
    """The programs of a rank's stages."""
    home, programs = piped.schedule.home, pipeline.stages.programs
    parts = [(kind, stage) for stage in range(pipeline.stages.count) for kind in KINDS if home[stage] == piped.rank]
    return {
        part: compiled_part(pipeline, part, options, ways, account) for part in parts if programs[part].equations
    }  # fmt: skip


def drawing(pipeline: Pipeline, options: Options, account: Account) -> Program | None:
    """What draws the random numbers of a microbatch."""
    drawn = pipeline.stages.drawn
    return None if drawn is None else PartRun("draws", drawn, options).compiled(account)


def counting(forward: Forward, partition: Partition, options: Options, account: Account) -> Program | None:
    """What counts in a microbatch, on one rank of the other axes: the same on all of them."""
    trace = forward.counts
    if trace is None:
        return None
    pins = {v: partition.inputs[v] for v in trace.inputs if v in partition.inputs}
    pins |= {v: Placement.whole(partition.mesh, ()) for v in values_in(trace.outputs)}
    return PartRun("counts", partition.of(trace, pins).trace, options).compiled(account)


def with_counts(
    values: Sequence[Value], batch: Sequence[Tensor], count: int, counts: Program | None, buffers: Sequence[Tensor] = ()
) -> list[Tensor]:
    """The batch, and behind it the sums over its microbatches of what counts, by the buffers that counting reads."""
    if counts is None:
        return list(batch)
    parts = [x.chunk(count) if x.ndim else (x,) * count for x in batch]
    each = zip(*(counts.run(*xs, *buffers) for xs in zip(*parts, strict=True)), strict=True)
    sums = [torch.stack([*xs]).sum(0, dtype=v.dtype) for v, xs in zip(values[len(batch) :], each, strict=True)]
    return [*batch, *sums]


def microbatches(
    values: Sequence[Value], batch: Sequence[Tensor], count: int, draws: Program | None, channel: GroupChannel
) -> list[Env]:
    """The inputs of each microbatch, and what is drawn at random for it: what the first rank drew counts for all."""
    parts = [x.chunk(count) if x.ndim else (x,) * count for x in batch]
    batches: list[Env] = [dict(zip(values, xs, strict=True)) for xs in zip(*parts, strict=True)]
    if draws is not None:
        for env in batches:
            drawn = dict(zip(values_in(draws.trace.outputs), draws.run(), strict=True))
            for x in drawn.values():
                channel.share(x, 0)
            env.update(drawn)
    return batches


class PipelineExecutable(Executable):
    """Programs that a schedule calls, each many times a step."""

    def __init__(
        self, pipeline: Pipeline, parts: dict[Part, Program], draws: Program | None, counts: Program | None = None
    ) -> None:
        self.pipeline, self.parts, self.draws, self.counts = pipeline, parts, draws, counts
        self.ends = Ends(Layout(()), None, ())
        self.eager = self.derivative = self.call = _never
        self.enables_grad, self.reads = False, ()
        self.cuda_graph = "no CUDA graph: a pipeline waits for other ranks between its programs"

    def execute(self, part: Part, args: list) -> Sequence:
        """A program of this rank; one without equations gives nothing."""
        return self.parts[part].run(*args) if part in self.parts else ()


def _never(*_: object) -> object:
    raise AssertionError("the programs of a pipeline are called by its schedule")


def title(part: Part) -> str:
    return f"{part[0]}{part[1]}"


def told(pipeline: Pipeline, schedule: Schedule, alone: Sequence[str] = ()) -> tuple[str, ...]:
    """The pipeline in words: its table, and of each stage what it has, costs and sends."""
    stages = pipeline.stages
    lines = [
        *str(schedule).splitlines(),
        f"ranks do nothing for {schedule.bubble():.0%} of the time, if stages are equal",
    ]
    whole = sum(stages.costs) or 1.0
    for stage, cost in enumerate(stages.costs):
        names = [n for n, v in pipeline.weights.items() if stage in stages.readers[v]]
        span = f"{names[0]} to {names[-1]}" if names else "no weights"
        sends = [
            f"{sum(v.nbytes() for v in values):,} bytes {'on' if to > start else 'back'} to stage {to}"
            for (_, start, to), values in stages.sends.items() if start == stage
        ]  # fmt: skip
        sent = f"; a microbatch sends {', '.join(sends)}" if sends else ""
        lines.append(f"stage {stage} on rank {schedule.home[stage]}: {span}, {cost / whole:.0%} of the work{sent}")
    for name, (owner, ranks, _) in pipeline.held.items():
        if len(ranks) > 1:
            lines.append(f"{name} is on the ranks {', '.join(map(str, ranks))}; rank {owner} updates it")
    lines += [f"sees the rows of a microbatch alone: {what}" for what in alone]
    lines.append("exchanges along other axes are counted for one microbatch, and the update")
    return tuple(lines)


def same_lines(account: Account, edits: Edits) -> list[str]:
    """What must be the same on all ranks: the program before it was cut, and the pipeline."""
    lines = [line.strip() for trace in _same(account, edits) for line in str(trace).splitlines()]
    return [*lines, *account.pipeline]


def pipeline_digest(account: Account, edits: Edits) -> str:
    return digest_of(_same(account, edits), account.pipeline)


def _same(account: Account, edits: Edits) -> list[Trace]:
    """Updates are each rank's own."""
    return [*edits.values(), *(trace for title, trace in account.stages if title in ("shard", "joint shard"))]
