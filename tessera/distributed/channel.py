"""The channel of a pipeline over process groups.

In: the messages that a rank's steps name. Out: what other ranks sent. A message is a tensor or several, each sent by
itself, in the order in which both ranks name them; what is on its way is kept until it has gone. Whoever fails to hear
of a rank says which message it waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tessera.distributed import watch
from tessera.distributed.carried import moved
from tessera.ir.equation import Value
from tessera.ir.strides import resolved
from tessera.torch_internals.distributed import deadline_of
from tessera.transforms.pipelined.cut import Stages
from tessera.transforms.pipelined.orders import Message

TAGS = 1 << 8  # tensors of a message, and microbatches, that tags tell apart; beyond that their order does


class GroupChannel:
    def __init__(self, device_mesh: DeviceMesh, axis: str, stages: Stages, home: dict[int, int]) -> None:
        self.group = device_mesh.get_group(axis)
        self.here = device_mesh.get_local_rank(axis)
        self.device = torch.device(device_mesh.device_type)
        self.ranks = dist.get_process_group_ranks(self.group)
        self.stages, self.home, self.axis = stages, home, axis
        self.numbers = {key: i for i, key in enumerate(stages.sends)}
        self.coming: dict[Message, tuple[list[Tensor], list]] = {}
        self.going: list[tuple[list[Tensor], list]] = []
        self.bytes_sent = 0
        self.fake = dist.get_backend(self.group) == "fake"

    def room(self, v: Value, times: int = 1) -> Tensor:
        """Where a tensor will be received. Ranks that do not exist send nothing, and programs look at numbers: zeros
        are places in any table, what memory happens to hold is not."""
        x = empty_of(v, times)
        return x.zero_() if self.fake else x

    def expect(self, message: Message) -> None:
        buffers = [self.room(v) for v in self.stages.sends[message.key]]
        source = self.ranks[self.home[message.start]]
        works = [
            self.named(lambda x=x, i=i: dist.irecv(x, source, self.group, self.tag(message, i)), message)
            for i, x in enumerate(buffers)
        ]
        self.coming[message] = buffers, works

    def send(self, message: Message, values: Sequence) -> None:
        self.going = [(xs, works) for xs, works in self.going if not all(w.is_completed() for w in works)]
        tensors = [resolved(x).contiguous() for x in values]
        target = self.ranks[self.home[message.to]]
        works = [
            self.named(lambda x=x, i=i: dist.isend(x, target, self.group, self.tag(message, i)), message)
            for i, x in enumerate(tensors)
        ]
        self.going.append((tensors, works))
        self.bytes_sent += sum(x.nbytes for x in tensors)

    def take(self, message: Message) -> list[Tensor]:
        buffers, works = self.coming.pop(message)
        for work in works:
            self.wait(work, message)
        types = [v.tensor for v in self.stages.sends[message.key]]
        return [_laid_out(x, tuple(map(int, t.stride))) for x, t in zip(buffers, types, strict=True)]

    def finish(self) -> None:
        """Wait until everything has gone."""
        for _, works in self.going:
            for work in works:
                self.wait(work, "what this stage sent")
        self.going.clear()

    def tag(self, message: Message, index: int) -> int:
        number = self.numbers[message.key]
        return (number * TAGS + message.microbatch % TAGS) * TAGS + index % TAGS

    def wait(self, work: Any, what: object) -> None:
        """Until the deadline: gloo's messages know only the one that a group was made with. On a GPU a wait with one
        would stop the host, and NCCL keeps it itself."""
        late = () if self.fake or self.device.type != "cpu" else (deadline_of(self.group, self.device),)
        self.named(lambda: work.wait(*late), what)

    def named(self, run: Callable, what: object) -> Any:
        """What a message gives; where it does not go through, the error says who is missing."""
        if isinstance(what, Message):
            ends = [self.ranks[self.home[stage]] for stage in (what.start, what.to)]
            what = f"{what}, between the ranks {ends},"
        with watch.waiting(f"{what} did not go through along {self.axis}", self.ranks):
            return run()

    # --- beside the schedule ---

    def share(self, x: Tensor, place: int) -> None:
        """Everyone along the pipeline gets what the rank at a place has, in place."""
        buffer = resolved(x).contiguous()
        self.named(lambda: dist.broadcast(moved(buffer), self.ranks[place], self.group), "what one stage has for all")
        if buffer is not x:
            x.copy_(buffer)

    def everyones(self, v: Value, whole: Tensor | None, stage: int, times: int) -> Tensor:
        """What a stage made, on every rank: `whole` where the stage is here, with so many `times` the rows of `v`."""
        x = self.room(v, times) if whole is None else whole.contiguous()
        self.share(x, self.home[stage])
        return x

    def hand_on(self, x: Tensor, owner: int, others: Sequence[int]) -> None:
        """Some ranks get what the owner has, in place."""
        what = "a weight of several stages"
        if self.here == owner:
            sent = resolved(x).contiguous()
            works = [self.named(partial(dist.isend, sent, self.ranks[r], self.group), what) for r in others]
            self.going.append(([sent], works))
        elif self.here in others and not self.fake:
            buffer = torch.empty_like(x, memory_format=torch.contiguous_format)
            work = self.named(lambda: dist.irecv(buffer, self.ranks[owner], self.group), what)
            if work is not None:
                self.wait(work, what)
            x.copy_(buffer)

    def add_up(self, x: Tensor) -> None:
        """The sum over the pipeline, in place."""
        self.named(lambda: dist.all_reduce(x, group=self.group), "a sum over stages")


def empty_of(v: Value, times: int = 1, device: str | None = None) -> Tensor:
    shape = [int(n) for n in v.shape]
    rows = [shape[0] * times, *shape[1:]] if shape else []
    return torch.empty(rows, dtype=v.tensor.dtype, device=device or v.tensor.device)


def _laid_out(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    return x if x.stride() == stride else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
