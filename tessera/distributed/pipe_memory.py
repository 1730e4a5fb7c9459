"""The memory that one rank of a pipeline adds to its weights while it works.

In: the programs of stages, as they were cut and as they are compiled, and a rank's steps. Out: the most bytes that live
at once. It goes through the steps as `Worker` does, with sizes in place of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera.distributed.pipelined import Env, Worker
from tessera.ir.equation import Value, values_in
from tessera.ir.trace import Trace
from tessera.passes.memory.alias import roots
from tessera.passes.memory.schedule import peak_memory
from tessera.transforms.pipelined.cut import Part, Stages
from tessera.transforms.pipelined.orders import Message, Step


@dataclass(eq=False)
class _Memory:
    """What stands for a tensor's memory; views share it."""

    bytes: int


class PipeMemory:
    """A rank's step, and the memory of its values."""

    def __init__(
        self, stages: Stages, steps: Sequence[Step], compiled: Mapping[Part, Trace], grads: Sequence[Value], split: bool
    ) -> None:
        self.stages, self.compiled, self.most = stages, compiled, 0
        self.shared = {part: roots(trace) for part, trace in compiled.items()}
        self.peaks = {part: peak_memory(trace) for part, trace in compiled.items()}
        self.expected: dict[Message, list[_Memory]] = {}
        self.going: list[_Memory] = []
        self.worker = Worker(stages, steps, self.run, self.add, self, grads, split)

    def peak(self, microbatches: int) -> int:
        """The most bytes at once, beside weights and the batch."""
        known = {v: _Memory(0) for part in self.compiled for v in self.stages.programs[part].inputs}
        for _ in self.worker.run(known, [{} for _ in range(microbatches)]):
            raise AssertionError("a message that is expected is there")
        return self.most

    def living(self) -> int:
        worker = self.worker
        envs: list[Env] = [*worker.held.values(), *worker.results, worker.sums]
        memories = {memory for env in envs for memory in env.values()}
        return sum(m.bytes for m in memories.union(self.going, *self.expected.values()))  # type: ignore[attr-defined]

    def run(self, part: Part, args: list) -> list[_Memory]:
        if part not in self.compiled:
            return []
        trace, shared = self.compiled[part], self.shared[part]
        self.most = max(self.most, self.living() + self.peaks[part])
        memories: dict[Value, _Memory] = dict(zip(trace.inputs, args, strict=True))
        given = []
        for v in values_in(trace.outputs):
            root = next(iter(shared[v]), v) if v not in shared[v] else v
            given.append(memories.setdefault(root, _Memory(root.nbytes())))
        return given

    def add(self, total: _Memory, grad: _Memory) -> _Memory:
        self.most = max(self.most, self.living() + total.bytes)
        return _Memory(total.bytes)

    # --- a channel whose messages are there ---

    def expect(self, message: Message) -> None:
        self.expected[message] = [_Memory(v.nbytes()) for v in self.stages.sends[message.key]]
        self.most = max(self.most, self.living())

    def send(self, message: Message, values: Sequence) -> None:
        self.going = [*values]  # until the next one goes

    def take(self, message: Message) -> Sequence:
        return self.expected.pop(message)
