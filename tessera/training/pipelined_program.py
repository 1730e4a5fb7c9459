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
from tessera.ir.serial import Writer
from tessera.ir.trace import Trace
from tessera.optim.updates import Extra, norm_dtype, stacked_norms
from tessera.pipeline.account import Account, Program
from tessera.pipeline.options import Options
from tessera.pipeline.pipelined import (
    PartRun,
    Piped,
    Pipeline,
    PipelineExecutable,
    counting,
    cut_run,
    drawing,
    own_parts,
    pipeline_digest,
    told,
)
from tessera.pipeline.run import Edits
from tessera.pipeline.stored_pipeline import piped_data, read_held, read_pipeline, write_held, write_pipeline
from tessera.store.key import Key
from tessera.store.program import Stored, load_note, save_note
from tessera.training.program import StepProgram, plan_data, read_extras, seeded, write_extras
from tessera.training.sharded_program import Recipe, ShardedCompilation, ShardedStepRun
from tessera.transforms.halves import Split
from tessera.transforms.shard.joint import Partition
from tessera.util.errors import Unserial


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
    executable: PipelineExecutable  # type: ignore[assignment]
    own: list[str]  # the weights that this rank updates
    update_extras: tuple[Extra, ...]
    written: list[int]  # inputs that the update writes

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

    # --- kept on disk, for each place along the pipeline: first which weights have gradients and who has each, then,
    # for the update of this rank's, the programs ---

    def identity(self) -> dict[str, object]:
        return {**super().identity(), **piped_data(self.piped)}

    def load(self, key: Key) -> bool:
        note = load_note(key)
        if note is None:
            return False
        every = list(self.forward.weights)
        self.with_grads, self.own = ([every[i] for i in places] for places in note[:2])
        self.piped.settle(read_held(note[2]))
        self.plan_of(self.own)
        more = plan_data(self.plan, [*note[0]])
        if more is None or not StepProgram.load(self, key.with_more(more)):
            return False
        plan, own, ask = replace(self.plan, norms=None), self.own, self.recipe.update  # the optimizer goes on
        self.recipe = replace(self.recipe, update=lambda names: plan if names == own else ask(names))
        return True

    def store(self, key: Key) -> None:
        every = list(self.forward.weights)
        places = [[every.index(name) for name in names] for names in (self.with_grads, self.own)]
        more = plan_data(self.plan, [*places[0]])
        if more is None:
            raise Unserial(f"the optimizer {self.plan.rule.name} is not one of Tessera's own rules")
        StepProgram.store(self, key.with_more(more))
        save_note(key, [*places, write_held(self.pipeline.held)])

    def details(self, writer: Writer) -> dict:
        return {
            "parts": [*map(list, self.executable.parts)],
            "more": [p is not None for p in (self.executable.draws, self.executable.counts, self.norms, self.update)],
            "pipeline": write_pipeline(self.pipeline, writer),
            "extras": write_extras(self.extras, writer),
            "written": self.written,
            "places": self.places,
            "results": self.results,
            "digest": self.digest,
        }

    def restored(self, programs: list[Program], stored: Stored) -> PipelineExecutable:  # type: ignore[override]
        details, reader = stored.details, stored.reader
        self.digest, self.places, self.results = details["digest"], details["places"], details["results"]
        pipeline, left = read_pipeline(details["pipeline"], reader, self.piped), iter(programs)
        parts = {(kind, stage): next(left) for kind, stage in details["parts"]}
        draws, counts, self.norms, self.update = (next(left) if there else None for there in details["more"])
        self.update_extras, self.written = read_extras(details["extras"], reader), details["written"]
        return PipelineExecutable(pipeline, parts, draws, counts)

    # --- compiled ---

    def through(self, captured: Captured, edits: Edits) -> tuple[PipelineExecutable, Account]:  # type: ignore[override]
        run = self.run = PipelinedRun(self, captured, edits)
        run.go()
        pipeline = cut_run(run, self.forward, self.piped)
        self.with_grads = list(named_grads(pipeline))
        self.piped.settle(pipeline.held)
        run.account.pipeline = told(pipeline, self.piped.schedule, self.forward.alone)
        run.account.pipeline_axis = self.piped.axis
        parts = own_parts(pipeline, self.piped, self.options, self.partition.ways, run.account)
        draws = drawing(pipeline, self.options, run.account)
        counts = counting(self.forward, self.partition, self.options, run.account)
        self.own = [name for name in self.with_grads if pipeline.held[name].owner == self.piped.rank]
        self.update_of(self.own, run.account)
        outputs = run.split.forward.outputs[: self.forward.results]
        self.places, self.results = [run.results.index(v) for v in outputs], len(run.results)
        self.digest = pipeline_digest(run.account, edits)
        return PipelineExecutable(pipeline, parts, draws, counts), run.account

    def plan_of(self, names: list[str]) -> None:
        """The update of some weights; clipping is by the norms of all."""
        self.plan = self.recipe.update(names)
        if "norm" in self.plan.clips:
            self.plan = replace(self.plan, norms=len(self.with_grads))
        self.norm_dtype = norm_dtype(self.forward.weights[n].dtype for n in self.with_grads)

    def update_of(self, names: list[str], account: Account) -> None:
        """Clipping and update of the weights that a rank owns."""
        run = self.run
        self.plan_of(names)
        self.norms = self.update = None
        self.update_extras, self.written = (), []
        if not names:
            return
        if self.plan.norms is not None:
            trace = run.keep("norms", run.norms(names, self.norm_dtype))
            self.norms = PartRun("norms", trace, self.options).compiled(account)
        run.with_grads = names
        trace, self.update_extras = run.update(self.plan)
        self.update = PartRun("update", trace, self.options).compiled(account)
        self.written = [i for i, v in enumerate(self.update.trace.inputs) if v in trace.mutations]

    @property
    def pipeline(self) -> Pipeline:
        return self.executable.pipeline

    @property
    def grads(self) -> dict[str, Value]:
        return named_grads(self.pipeline)

    @property
    def extras(self) -> tuple[Extra, ...]:
        return self.update_extras


def named_grads(pipeline: Pipeline) -> dict[str, Value]:
    """The gradients of weights."""
    names = {v: name for name, v in pipeline.weights.items()}
    return {names[v]: grad for v, grad in pipeline.grads.items()}
