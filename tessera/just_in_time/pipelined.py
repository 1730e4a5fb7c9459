"""`jit` of a model over a pipeline of ranks.

Every call gives all ranks of the pipeline the same part of a batch, which is cut into microbatches, and every rank gets
the results. The forwards of all microbatches run in the call and their backwards in `.backward()`, since a caller sees
the results between the two; `train_step` runs the schedule of the plan. A call with caches of keys and values is one
microbatch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from tessera.distributed.agree import agree
from tessera.distributed.caches import HEADS, Caches, Slot
from tessera.distributed.capture import Forward, capture
from tessera.distributed.once import meet
from tessera.frontends.captured import Captured
from tessera.ir.equation import Value
from tessera.ir.trace import Trace
from tessera.just_in_time.backend import GraphRecord
from tessera.just_in_time.pipelined_program import PipelinedProgram
from tessera.just_in_time.sharded import ShardedCall, ShardedGraph, held_by, partition_of
from tessera.pipeline.account import Account
from tessera.pipeline.options import Options
from tessera.pipeline.pipelined import Piped, Pipeline, PipelineExecutable, cut_run, drawing, own_parts, told
from tessera.pipeline.run import Edits
from tessera.pipeline.sharded import ShardedRun
from tessera.pipeline.stage import PROGRAM
from tessera.transforms.pipelined.known import in_passes
from tessera.transforms.shard.joint import Partition
from tessera.util.errors import OptionError


class PipelinedCall(ShardedCall):
    """The call of a model whose stages are on several ranks."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.cached: dict[Slot, int] = {}  # of tensors in caches, the stage that has them

    def _for_sizes(self, batch: tuple, named: dict, leaves: list, grad: bool) -> PipelinedProgram:  # type: ignore[override]
        return self._prepare(batch, named, leaves, grad)

    def _prepare(  # type: ignore[override]
        self, batch: tuple, named: dict, leaves: list, grad: bool, caches: Caches | None = None
    ) -> PipelinedProgram:
        sharding, model = self.sharding, self.model
        pipe = sharding.plan.pipe
        assert pipe is not None
        count = self._microbatches(leaves) if caches is None else 1
        types, watched = sharding.whole_batch(leaves, count), sharding.watched(model)
        forward = capture(model, None, batch, named, types, watched, caches)
        lies = sharding.settle(model, forward, leaves).on(sharding.plan.inner)
        needs = [x.requires_grad for x in (*held_by(model, forward), *(x for x in leaves if isinstance(x, Tensor)))]
        grad = grad and caches is None and any(needs)
        kept, made = ({}, {}) if caches is None else self._kept(forward, caches)
        piped = Piped(
            in_passes(pipe.home, count, grad), pipe.axis, sharding.device_mesh.get_local_rank(pipe.axis), pipe.starts,
            sharding.stages, lambda held: sharding.settle_stages(model, held), kept, made,
        )  # fmt: skip
        name = f"{type(model).__name__}_{len(self.programs)}"
        partition = partition_of(sharding, model, forward, lies)
        compilation = PipelinedGraph(name, forward, partition, needs, self.options, grad, piped)
        lines = _lines(compilation)
        meet()
        agree(sharding, leaves, hashlib.sha256("\n".join(lines).encode()).hexdigest(), lambda: lines)
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


def _lines(of: PipelinedGraph) -> list[str]:
    """What must be the same on all ranks: the program before it was cut, and the pipeline."""
    partitioned = [trace for name, trace in of.account.stages if name.split()[-1] == "shard"]
    return [line.strip() for trace in partitioned for line in str(trace).splitlines()] + [*of.account.pipeline]


class PipelinedRun(ShardedRun):
    kinds = ("pipelined inference", "pipelined training")

    def pull(self, core: Trace) -> list[Value]:
        """What is handed back as it was given has its gradient already."""
        return [v for v in super().pull(core) or [] if v not in core.inputs]


class PipelinedGraph(ShardedGraph):
    """One rank's programs of a call."""

    kinds = (*PipelinedRun.kinds, "part of a pipeline")
    pipeline: Pipeline
    final: dict[Value, Value]  # of the results that were captured, those of the programs

    def __init__(
        self,
        name: str,
        forward: Forward,
        partition: Partition,
        needs: Sequence[bool],
        options: Options,
        grad: bool,
        piped: Piped,
    ) -> None:
        self.piped, self.differentiates = piped, grad
        super().__init__(name, forward, partition, needs, options)

    def key(self) -> None:
        """Not kept on disk."""
        return None

    def through(self, captured: Captured, edits: Edits) -> tuple[PipelineExecutable, Account]:  # type: ignore[override]
        trace, partition = self.distinct()
        run = PipelinedRun(self.name, captured, trace, partition, self.options, self.differentiates, edits)
        run.go()
        pipeline = self.pipeline = cut_run(run, self.forward, self.piped)
        self.piped.settle(pipeline.held)
        run.account.pipeline, run.account.pipeline_axis = told(pipeline, self.piped.schedule), self.piped.axis
        self.parts = own_parts(pipeline, self.piped, self.options, partition.ways, run.account)
        self.draws = drawing(pipeline, self.options, run.account)
        final = run.traces[PROGRAM].outputs if run.kind == run.plain_kind else run.split.forward.outputs
        self.final = dict(zip(self.forward.distinct, final, strict=False))  # type: ignore[arg-type]
        return PipelineExecutable(), run.account
