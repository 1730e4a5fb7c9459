"""The memory that one rank's training step needs: what is there before it runs, and the most that it adds.

In: a compiled step on a mesh. Out: `Needs`. A plan that does not fit the device is refused before anything runs, with
what takes how much.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tessera.distributed.pipe_memory import PipeMemory
from tessera.distributed.room import check_room, in_gb
from tessera.ir.trace import Trace
from tessera.passes.memory.schedule import live_bytes, peak_memory
from tessera.training.pipelined_program import PipelinedCompilation
from tessera.training.sharded_program import ShardedCompilation


@dataclass(frozen=True)
class Needs:
    """Bytes."""

    weights: int  # and buffers
    state: int  # of the optimizer
    batch: int
    added: int  # while the step runs
    at: str = ""  # the line at which that is most

    @property
    def total(self) -> int:
        return self.weights + self.state + self.batch + self.added

    def told(self) -> str:
        where = f" at {self.at}" if self.at else ""
        parts = (self.weights, "weights"), (self.state, "the optimizer's state"), (self.batch, "the batch")
        held = ", ".join(f"{in_gb(count)} of {what}" for count, what in parts)
        return f"{held}, and {in_gb(self.added)} while the step runs{where}"


def needs(of: ShardedCompilation) -> Needs:
    if isinstance(of, PipelinedCompilation):
        return _pipelined(of)
    (program,) = of.programs
    sizes, held = [v.nbytes() for v in program.trace.inputs], len(of.forward.weights) + len(of.forward.buffers)
    given = held + len(of.forward.batch)
    return Needs(sum(sizes[:held]), sum(sizes[given:]), sum(sizes[held:given]), *_most(program.trace))


def _most(trace: Trace) -> tuple[int, str]:
    during = [most for most, _ in live_bytes(trace)]
    peak = max(during, default=0)
    return peak, str(trace.equations[during.index(peak)].source) if during else ""


def _pipelined(of: PipelinedCompilation) -> Needs:
    pipeline, schedule, rank = of.pipeline, of.piped.schedule, of.piped.rank
    compiled = {part: program.trace for part, program in of.executable.parts.items()}
    steps = pipeline.rows[rank]
    added = PipeMemory(pipeline.stages, steps, compiled, pipeline.summed, schedule.split).peak(schedule.microbatches)
    own = [v for name, v in pipeline.weights.items() if rank in pipeline.held[name].ranks]
    state = 0
    if of.update is not None:
        grads = of.update.trace.inputs[: len(of.own)]
        extras = zip(of.update.trace.inputs[len(of.own) :], of.extras, strict=True)
        state = sum(v.nbytes() for v, extra in extras if extra.kind == "state")
        added = max(added, sum(v.nbytes() for v in grads) + peak_memory(of.update.trace))
    held = sum(v.nbytes() for v in (*own, *pipeline.buffers.values()))
    return Needs(held, state, sum(v.nbytes() for v in pipeline.batch) * schedule.microbatches, added)


def check_needs(of: ShardedCompilation, device: torch.device) -> None:
    """Refuse what cannot fit. Sizes of a program's values are the least that it takes: libraries need some more."""
    if device.type == "cuda":
        needed = needs(of)
        check_room(needed.total, needed.told(), device)
