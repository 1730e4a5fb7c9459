"""The programs of a training step on one rank of a pipeline.

In: a captured loss over a microbatch, where everything lies, a schedule, an optimizer's plan. Out: a compilation. The
loss is differentiated, partitioned over the other axes and split into halves as any training program; both halves
together are cut into stages. Only the programs of this rank's stages are compiled, and the update of the weights whose
gradients they make. What ranks tell each other beside the schedule stands between programs: the norms of all gradients,
which clipping needs, are an input of the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tessera.distributed.capture import Forward
from tessera.distributed.plan import Layout as Lies
from tessera.frontends.captured import Captured
from tessera.ir.builder import Builder
from tessera.ir.equation import Value
from tessera.ir.trace import Trace
from tessera.optim.updates import Extra, norm_dtype, stacked_norms
from tessera.pipeline.account import Account
from tessera.pipeline.options import Options
from tessera.pipeline.pipelined import (
    PartRun,
    Piped,
    Pipeline,
    PipelineExecutable,
    cut_run,
    drawing,
    own_parts,
    told,
)
from tessera.pipeline.run import Edits
from tessera.training.program import seeded
from tessera.training.sharded_program import Recipe, ShardedCompilation, ShardedStepRun
from tessera.transforms.remat import Split
from tessera.transforms.shard.joint import Partition


class PipelinedRun(ShardedStepRun):
    """A captured loss on its way to the stages of a pipeline."""

    of: PipelinedCompilation

    def begin(self, grad: bool) -> None:
        super().begin(grad)
        self.kind = "pipelined training"

    def backward_of(self, split: Split) -> Trace:
        scale = self.of.recipe.scale / self.of.piped.schedule.microbatches
        return seeded(split.backward, self.joint, scale)

    def norms(self, names: Sequence[str], dtype: torch.dtype) -> Trace:
        """The norm of each of these gradients, on one rank of the other axes."""
        lies, builder = self.of.lies, Builder("norms")
        values = [builder.input(f"{n.replace('.', '_')}_grad", self.of.forward.weights[n].tensor) for n in names]
        with builder:
            whole = builder.finish([stacked_norms(values, dtype)])
        pins = {v: lies.grads[n] for v, n in zip(whole.inputs, names, strict=True)}
        return self.partition.of(whole, pins).trace


class PipelinedCompilation(ShardedCompilation):
    """One rank's programs of a step."""

    kinds = ("pipelined training", "part of a pipeline")
    run: PipelinedRun
    pipeline: Pipeline
    grads: dict[str, Value]  # of weights
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

    def key(self) -> None:
        """Not kept on disk."""
        return None

    def through(self, captured: Captured, edits: Edits) -> tuple[PipelineExecutable, Account]:  # type: ignore[override]
        run = self.run = PipelinedRun(self, captured, edits)
        run.go()
        pipeline = self.pipeline = cut_run(run, self.forward, self.piped)
        names = {v: name for name, v in pipeline.weights.items()}
        self.grads = {names[v]: grad for v, grad in pipeline.grads.items()}
        self.with_grads = list(self.grads)
        self.piped.settle(pipeline.held)
        run.account.pipeline, run.account.pipeline_axis = told(pipeline, self.piped.schedule), self.piped.axis
        self.parts = own_parts(pipeline, self.piped, self.options, self.partition.ways, run.account)
        self.draws = drawing(pipeline, self.options, run.account)
        self.own = [name for name in self.with_grads if pipeline.held[name].owner == self.piped.rank]
        self.update_of(self.own, run.account)
        outputs = run.split.forward.outputs[: self.forward.results]
        self.places, self.results = [run.results.index(v) for v in outputs], len(run.results)
        return PipelineExecutable(), run.account

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
