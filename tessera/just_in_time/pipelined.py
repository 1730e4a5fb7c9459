"""`jit` of a model over a pipeline of ranks.

Every call gives all ranks of the pipeline the same part of a batch, which is cut into microbatches, and every rank gets
the results. The forwards of all microbatches run in the call and their backwards in `.backward()`, since a caller sees
the results between the two; `train_step` runs the schedule of the plan. A call with caches of keys and values is one
microbatch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from tessera.distributed.alone import warned
from tessera.distributed.caches import HEADS, Caches, Slot
from tessera.distributed.capture import Forward, capture
from tessera.distributed.once import meet
from tessera.distributed.users_line import at_users_line
from tessera.distributed.whole_batch import over_whole_batch, refuse_steady
from tessera.frontends.captured import Captured
from tessera.ir.equation import Value
from tessera.ir.serial import Writer
from tessera.ir.trace import Trace
from tessera.just_in_time.backend import GraphRecord
from tessera.just_in_time.pipelined_program import PipelinedProgram
from tessera.just_in_time.sharded import ShardedCall, ShardedGraph, held_by, partition_of
from tessera.pipeline.account import Account, Program
from tessera.pipeline.pipelined import (
    Piped,
    PipelineExecutable,
    cut_run,
    drawing,
    own_parts,
    pipeline_digest,
    same_lines,
    told,
)
from tessera.pipeline.run import Edits
from tessera.pipeline.sharded import ShardedRun
from tessera.pipeline.stage import PROGRAM
from tessera.pipeline.stored_pipeline import piped_data, read_pipeline, write_pipeline
from tessera.store.program import Stored
from tessera.transforms.pipelined.named_schedules import in_passes
from tessera.util.errors import OptionError


class PipelinedCall(ShardedCall):
    """The call of a model whose stages are on several ranks."""

    lines = staticmethod(same_lines)

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.cached: dict[Slot, int] = {}  # of tensors in caches, the stage that has them

    def _for_sizes(self, batch: tuple, named: dict, leaves: list, grad: bool) -> PipelinedProgram:  # type: ignore[override]
        return self._prepare(batch, named, leaves, grad)

    @at_users_line
    def _prepare(  # type: ignore[override]
        self, batch: tuple, named: dict, leaves: list, grad: bool, caches: Caches | None = None
    ) -> PipelinedProgram:
        sharding, model = self.sharding, self.model
        pipe = sharding.plan.pipe
        assert pipe is not None
        count = self._microbatches(leaves) if caches is None else 1

        def captured(microbatches: int) -> Forward:
            types, watched = sharding.whole_batch(leaves, microbatches), sharding.watched(model)
            return capture(model, None, batch, named, types, watched, caches, sharding.regions)

        forward = captured(count)
        needs = [x.requires_grad for x in (*held_by(model, forward), *(x for x in leaves if isinstance(x, Tensor)))]
        grad = grad and caches is None and any(needs)
        if count > 1:
            whole = captured(1)
            refuse_steady(forward, whole, "jit")
            seen = over_whole_batch(forward, whole, count, pulled=grad).seen
            forward = replace(forward, alone=warned(seen, "jit", "results", sharding.device_mesh))
        lies = sharding.settle(model, forward, leaves).on(sharding.plan.inner)
        self.python.settle()
        kept, giving = ({}, {}) if caches is None else self._kept(forward, caches)
        piped = Piped(
            in_passes(pipe.home, count, grad), pipe.axis, sharding.device_mesh.get_local_rank(pipe.axis), pipe.starts,
            sharding.stages, lambda held: sharding.settle_stages(model, held), kept, giving,
        )  # fmt: skip
        name = f"{type(model).__name__}_{len(self.programs)}"
        partition = partition_of(sharding, model, forward, lies)
        compilation = PipelinedGraph(piped, grad, name, forward, partition, needs, self.options)
        meet()
        self.backend.graphs.append(GraphRecord(name, "", compilation))
        program = PipelinedProgram(model, sharding, forward, compilation)
        if caches is not None:
            self.cached |= program.stages_of(caches)
        return program

    def _microbatches(self, leaves: list) -> int:
        """As many as were asked for, or divide the rows; one where arguments have different numbers of rows."""
        sharding, rows = self.sharding, self.sharding.rows(leaves)
        assert sharding.plan.pipe is not None
        if len(rows) == 1:
            return sharding.plan.pipe.microbatches(rows[0], sharding.microbatches)
        if sharding.microbatches not in (None, 1):
            raise OptionError(f"pipeline: expected tensors of as many rows as the batch has, got {rows}")
        return 1

    def _kept(self, forward: Forward, caches: Caches) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
        """Tensors in caches among the inputs and the results, and the stages that have them, as far as they are
        known."""
        assert forward.left is not None
        first, count = len(forward.batch) - len(caches.slots), len(forward.left.slots)
        kept = {
            first + i: (self.cached[slot],) if slot in self.cached else ()
            for i, (slot, x) in enumerate(zip(caches.slots, caches.tensors, strict=True)) if x.ndim == HEADS
        }  # fmt: skip
        places = {v: i for i, v in enumerate(forward.distinct)}
        new = zip(forward.left.slots, forward.outputs[forward.results - count :], strict=True)
        return kept, {places[v]: self.cached[slot] for slot, v in new if slot in self.cached and v in places}


class PipelinedRun(ShardedRun):
    kinds = ("pipelined inference", "pipelined training")

    def pull(self, core: Trace) -> list[Value]:
        """What is handed back as it was given has its gradient already."""
        return [v for v in super().pull(core) or [] if v not in core.inputs]


class CallExecutable(PipelineExecutable):
    final: dict[Value, Value]  # of the results that were captured, those of the programs


class PipelinedGraph(ShardedGraph):
    """One rank's programs of a call."""

    kinds = (*PipelinedRun.kinds, "part of a pipeline")
    executable: CallExecutable

    def __init__(self, piped: Piped, grad: bool, *graph: Any) -> None:
        """`graph`: what a `ShardedGraph` takes."""
        self.piped, self.differentiates = piped, grad
        super().__init__(*graph)

    # --- kept on disk, for each place along the pipeline ---

    def identity(self) -> dict[str, object]:
        return {**super().identity(), **piped_data(self.piped), "differentiates": self.differentiates}

    def details(self, writer: Writer) -> dict:
        executable = self.executable
        return {
            "parts": [*map(list, executable.parts)],
            "pipeline": write_pipeline(executable.pipeline, writer),
            "final": [writer.value(executable.final[v]) for v in self.forward.distinct],
            "digest": self.digest,
        }

    def restored(self, programs: list[Program], stored: Stored) -> CallExecutable:
        details, reader, left = stored.details, stored.reader, iter(programs)
        self.digest = details["digest"]
        parts = {(kind, stage): next(left) for kind, stage in details["parts"]}
        executable = CallExecutable(read_pipeline(details["pipeline"], reader, self.piped), parts, next(left, None))
        final = (reader.values[n] for n in details["final"])
        executable.final = dict(zip(self.forward.distinct, final, strict=True))
        self.piped.settle(executable.pipeline.held)
        return executable

    def through(self, captured: Captured, edits: Edits) -> tuple[CallExecutable, Account]:
        trace, partition = self.distinct()
        run = PipelinedRun(self.name, captured, trace, partition, self.options, self.differentiates, edits)
        run.go()
        account, pipeline = run.account, cut_run(run, self.forward, self.piped)
        self.piped.settle(pipeline.held)
        account.pipeline = told(pipeline, self.piped.schedule, self.forward.alone)
        account.pipeline_axis = self.piped.axis
        parts = own_parts(pipeline, self.piped, self.options, partition.ways, account)
        executable = CallExecutable(pipeline, parts, drawing(pipeline, self.options, account))
        final = run.traces[PROGRAM].outputs if run.kind == run.plain_kind else run.split.forward.outputs
        executable.final = dict(zip(self.forward.distinct, final, strict=False))  # type: ignore[arg-type]
        self.digest = pipeline_digest(account, edits)
        return executable, account
