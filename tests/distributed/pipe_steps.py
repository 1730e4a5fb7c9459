"""Training steps on all ranks of a mesh with a pipeline, in one process.

The front door is used as rank 0 of a group that does not exist; the programs of the other ranks are compiled from the
same stages. Ranks of the pipeline run side by side and have only what they were sent; those of the other axes run in
step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import torch
from steps import OPTIMIZERS, Trained, pretended
from torch import Tensor, nn

import tessera
from tessera.distributed import in_step
from tessera.distributed.pipelined import together, workers
from tessera.distributed.plan import DATA
from tessera.pipeline.account import Account
from tessera.pipeline.pipelined import compiled_part
from tessera.training.pipelined import PipelinedStep
from tessera.training.pipelined_program import PipelinedCompilation


def pipelined_step(
    model: nn.Module, loss_fn: Callable, batch: list, axes: dict, plan: object, optimizer: str = "adam",
    clip: float | None = None, **options: object,
) -> tuple[PipelinedStep, PipelinedCompilation]:  # fmt: skip
    model = copy.deepcopy(model)
    with pretended(axes) as mesh:
        by = OPTIMIZERS[optimizer](model.parameters())
        step = tessera.train_step(
            model, loss_fn, by, clip_norm=clip, executors="aten", mesh=mesh, plan=plan, **options
        )  # fmt: skip
        step(*(x.chunk(data_ranks(step))[0] for x in batch))
    (program,) = step.programs.values()
    return step, program.compilation


def data_ranks(step: PipelinedStep) -> int:
    plan = step.sharding.plan
    return prod(plan.mesh.size(axis) for axis in plan.axes(*DATA))


def add(a: list, b: list) -> list:
    return list(map(torch.add, a, b))


@dataclass
class Held:
    """What ranks have between calls, of all of them, by name."""

    weights: dict[str, list] = field(default_factory=dict)  # and buffers
    state: dict[tuple[str, str], list] = field(default_factory=dict)
    sums: dict[str, list] = field(default_factory=dict)
    age: int = 0


class Ranks:
    """All ranks, from the same weights, or with what they have from calls of another size."""

    def __init__(
        self, model: nn.Module, step: PipelinedStep, compilation: PipelinedCompilation, held: Held | None = None
    ) -> None:
        self.step, self.of = step, compilation
        account, pipeline = Account(("aten",)), compilation.pipeline
        self.parts = {
            part: compiled_part(pipeline, part, compilation.options, compilation.partition.ways, account).trace
            for part, trace in pipeline.stages.programs.items() if trace.equations
        }  # fmt: skip
        self.workers = workers(
            pipeline.stages, compilation.piped.schedule, self.execute,
            add, pipeline.summed,
        )  # fmt: skip
        values, self.held = pipeline.weights | pipeline.buffers, held or Held()
        if held is None:
            whole = {name: x.detach().clone() for name, x in (*model.named_parameters(), *model.named_buffers())}
            self.held.weights = {n: in_step.cut(whole[n], v.type.placement) for n, v in values.items()}
        self.weights = {v: self.held.weights[n] for n, v in values.items()}
        self.updates = []
        for rank in range(len(pipeline.rows)):
            names = [name for name in compilation.with_grads if pipeline.held[name].owner == rank]
            compilation.update_of(names, account)
            of = compilation
            self.updates.append((names, of.plan, of.norms, of.update, of.update_extras))
        compilation.update_of(compilation.own, account)  # what the front door runs

    def execute(self, part: tuple, args: list) -> list:
        return in_step.run(self.parts[part], args) if part in self.parts else []

    def microbatches(self, batch: list[Tensor]) -> list[dict]:
        """Each rank along the data axes cuts its rows; microbatches are what all of them have together."""
        count, ranks = self.of.piped.schedule.microbatches, data_ranks(self.step)
        values, envs, counts = self.of.pipeline.batch, [], self.of.executable.counts
        for m in range(count):
            whole = [torch.cat([part.chunk(count)[m] for part in x.chunk(ranks)]) for x in batch]
            envs.append({v: in_step.cut(x, v.type.placement) for v, x in zip(values, whole, strict=False)})
        if counts is not None:
            names = [v.name for v in counts.trace.inputs[len(batch) :]]  # buffers that it reads
            buffers = [self.weights[v] for name in names for v in self.weights if v.name == name]
            each = zip(*(in_step.run(counts.trace, [*env.values(), *buffers]) for env in envs), strict=True)
            for v, parts in zip(values[len(batch) :], each, strict=True):
                total = torch.stack([xs[0] for xs in parts]).sum(0, dtype=v.dtype)
                for env in envs:
                    env[v] = in_step.cut(total, v.type.placement)
        for env in envs:
            if self.of.executable.draws is not None:
                drawn = (
                    in_step.run(self.of.executable.draws.trace, [])
                    if self.of.executable.draws.trace.inputs
                    else self.drawn()
                )
                env.update(zip(self.of.executable.draws.trace.outputs, drawn, strict=True))
        return envs

    def drawn(self) -> list[list]:
        ranks = self.of.partition.mesh.ranks
        return [[x] * ranks for x in self.of.executable.draws.run()]

    def loss(self, batch: list[Tensor], updates: bool = True) -> Tensor:
        """One call: the loss; gradients are added up, and with the last of some calls weights are updated."""
        grads, held = self.of.grads, self.held
        before = {v: held.sums[name] for name, v in grads.items() if name in held.sums}
        results, sums = together(self.workers, self.weights, self.microbatches(batch), before)
        loss = self.of.pipeline.outputs[0]
        out = torch.stack([in_step.join(r[loss], loss.type.placement) for r in results]).mean()
        held.sums = {name: sums[v] for name, v in grads.items()}
        if updates:
            self.update()
            held.sums = {}
        return out

    def update(self) -> None:
        self.held.age += 1
        of, grads = self.of, self.held.sums
        ranks = of.partition.mesh.ranks
        norms = [torch.zeros(len(grads), dtype=of.norm_dtype) for _ in range(ranks)]
        for names, _, norm, _, _ in self.updates:
            if norm is not None:
                (own,) = in_step.run(norm.trace, [grads[n] for n in names])
                for mine, x in zip(norms, own, strict=True):
                    mine[[of.with_grads.index(n) for n in names]] = x
        for names, plan, _, update, extras in self.updates:
            if update is not None:
                clips = [*self.step.settings.clips.values()]
                numbers = self.step.state.numbers(plan, [self.held.age] * len(plan.members), clips)
                more = [self.tensor(e, names, numbers, norms, ranks) for e in extras]
                in_step.run(update.trace, [*(grads[n] for n in names), *more])

    def tensor(self, extra, names: list[str], numbers: list[float], norms: list, ranks: int) -> list:
        match extra.kind:
            case "numbers":
                return [torch.tensor(numbers, dtype=extra.dtype)] * ranks
            case "norms":
                return norms
            case "param":
                return self.weights[self.of.pipeline.weights[names[extra.member]]]
        name = names[extra.member]
        place = self.of.lies.states[name]
        state = self.held.state
        if (name, extra.name) not in state:
            weight = self.of.forward.weights[name]
            zeros = torch.zeros([int(n) for n in weight.shape], dtype=weight.dtype)
            state[name, extra.name] = in_step.cut(zeros, place)
        return state[name, extra.name]

    def trained(self, batches: list) -> Trained:
        return Trained([self.loss(batch) for batch in batches], self.whole())

    def whole(self) -> dict[str, Tensor]:
        pipeline, lies = self.of.pipeline, self.of.lies
        held = {
            n: in_step.join(self.weights[v], v.type.placement) for n, v in (pipeline.weights | pipeline.buffers).items()
        }
        return held | {f"{n}.{slot}": in_step.join(x, lies.states[n]) for (n, slot), x in self.held.state.items()}
