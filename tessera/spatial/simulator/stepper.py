"""The judge of the judge: a listing run cycle by cycle, on bytes at addresses.

In: a small program and its inputs. Out: the outputs and the number of cycles, or a `Violation`. It is as plain as can
be and shares with the simulator the elementary functions alone: memory is bytes with an owner each, a cycle is a set
of what is in use, a product is values that move through an array one step at a time (`wavefront.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from tessera.machines.spatial import Core
from tessera.spatial.listing import Program
from tessera.spatial.listing import types as t
from tessera.spatial.simulator import values
from tessera.spatial.simulator.effects import Job, World
from tessera.util.safetensors import flat_bytes

LONGEST = 20_000  # cycles


def step(
    program: Program, *inputs: torch.Tensor, state: Mapping[str, torch.Tensor] | None = None
) -> tuple[tuple[torch.Tensor, ...], int]:
    stepper = Stepper(program, inputs, {**program.data, **(state or {})})
    return stepper.run(), stepper.world.cycle


class Stepper:
    def __init__(self, program: Program, inputs: tuple[torch.Tensor, ...], data: Mapping[str, torch.Tensor]) -> None:
        self.world = world = World(program, inputs, data)
        self.jobs: list[Job] = []
        if world.listing.sha256 != world.m.sha256 or world.listing.end > LONGEST:
            world.refuse("machine", None, f"expected a program for {world.m.key} of at most {LONGEST} cycles")
        if len(world.pages) != len(world.listing.pages) or not all(map(world.m.network.alive, world.pages)):
            world.refuse("core", None, "a page twice, or of no live core")

    def run(self) -> tuple[torch.Tensor, ...]:
        starts: dict[int, list[tuple[Core, t.Instruction]]] = {}
        for core, page in self.world.pages.items():
            for of in page.instructions:
                starts.setdefault(of.start, []).append((core, of))
        number = last = 0
        for self.world.cycle in range(LONGEST + 2):
            for job in self.jobs:
                if job.of.start + job.of.duration == self.world.cycle:
                    self.leave(job, outside=True)
                if job.end == self.world.cycle:
                    self.finish(job)
            self.jobs = [job for job in self.jobs if max(end for _, end, _ in job.tokens) > self.world.cycle]
            for core, page in self.world.pages.items():
                self.live(core, page)
            if not starts and not self.jobs and all(len(flow["got"]) == len(flow["at"]) for flow in self.world.flows):
                break
            for core, of in starts.pop(self.world.cycle, []):
                self.jobs.append(job := Job(number, core, of))
                self.world.start(job)
                number, last = number + 1, max(last, job.end)
            for flow in self.world.flows:
                for core, (at, unit) in flow["at"].items():
                    if at == self.world.cycle and core not in flow["got"]:
                        self.world.refuse("arrival", core, f"nobody receives at {unit}", flow["jobs"][0])
            self.use()
        if last != self.world.listing.end:
            self.world.refuse(
                "end", None, f"expected the end at {self.world.listing.end}; the last instruction ends at {last}"
            )
        for flow in self.world.flows:
            for job in flow["jobs"]:
                if job.of.duration != flow["need"]:
                    self.world.refuse("duration", job.core, f"expected {flow['need']} cycles", job, flow["jobs"][0])
        out = []
        for n, of in self.world.listing.outputs:
            if not (space := self.world.spaces["output", n]).written.all():
                self.world.refuse("output", None, f"{n} is not sent whole", f"output {n}")
            given = torch.empty(of.shape, dtype=values.dtype_of(of.dtype))
            out.append(torch.from_numpy(space.bytes).view(given.dtype).reshape(of.shape) if of.bytes else given)
        return tuple(out)

    def live(self, core: Core, page: t.CorePage) -> None:
        """Buffers that die now, then those that are born."""
        space = self.world.spaces[core]
        for number, of in enumerate(page.buffers):
            if of.lifetime is not None and of.lifetime[1] == self.world.cycle:
                space.owner[space.owner == number] = -1
        for number, of in enumerate(page.buffers):
            if self.world.cycle != (of.lifetime[0] if of.lifetime else 0):
                continue
            end, place = of.address + of.size, slice(of.address, of.address + of.size)
            if of.size != of.type.bytes or of.address % self.world.m.sram.align or end > self.world.m.sram.size:
                self.world.refuse("buffer", core, f"{of.name} has a wrong size or place", of)
            if (of.lifetime and of.lifetime[0] >= of.lifetime[1]) or len(page.buffers) != len(self.world.buffers[core]):
                self.world.refuse("buffer", core, f"{of.name} has no life or no name of its own", of)
            if (space.owner[place] >= 0).any():
                self.world.refuse(
                    "overlap", core, f"{of.name} lies over another", of, page.buffers[space.owner[place].max()]
                )
            space.owner[place], space.written[place] = number, False
            self.world.hold(space, of, of.address)

    def use(self) -> None:
        """What this cycle uses; nothing is used twice."""
        used: dict[tuple, Job] = {}
        for job in self.jobs:
            if job.of.start == self.world.cycle:
                self.touch(job, outside=True)
            if job.begin == self.world.cycle:
                self.touch(job, outside=False)
            for begin, end, token in job.tokens:
                if begin <= self.world.cycle < end and used.setdefault(token, job) is not job:
                    self.world.refuse(token[0], job.core, f"two users of {token[1:]}", used[token], job)
            for key, of, *_ in (*job.reads, *job.writes) if job.begin <= self.world.cycle < job.end else ():
                alive = key != job.core or of.lifetime is None or of.lifetime[0] <= self.world.cycle < of.lifetime[1]
                if not alive:
                    self.world.refuse("lifetime", job.core, f"{of.name} is dead", job, of)

    def leave(self, job: Job, outside: bool) -> None:
        for key, _, at, _ in job.reads:
            if (key != job.core) == outside:
                self.world.spaces[key].readers[at] -= 1

    def touch(self, job: Job, outside: bool) -> None:
        """Mark the bytes that an instruction reads and writes; nobody else touches what is written. Memory off the chip
        is touched when the instruction begins, a core's own when its ports are held."""
        for key, of, at, _ in job.reads:
            if (key != job.core) != outside:
                continue
            self.world.spaces[key].readers[at] += 1
            if (self.world.spaces[key].writer[at] >= 0).any():
                self.world.refuse("race", job.core, f"{of.name} is read while another writes it", job)
        for key, of, at in job.writes:
            if (key != job.core) != outside:
                continue
            space, mine = self.world.spaces[key], np.zeros(len(self.world.spaces[key].readers), int)
            for other, _, read, over in job.reads:
                if other == key:
                    mine[read] += 1
                    if np.isin(read, at).any() and not (over and np.array_equal(read, at)):
                        self.world.refuse("race", job.core, f"{of.name} is written while it is read", job)
            if (space.writer[at] >= 0).any() or (space.readers[at] > mine[at]).any():
                self.world.refuse("race", job.core, f"{of.name} is written while another uses it", job)
            if key == job.core and of.lifetime is None and not of.state:
                self.world.refuse("constant", job.core, f"{of.name} is constant", job)
            space.writer[at] = job.number

    def finish(self, job: Job) -> None:
        self.leave(job, outside=False)
        for (key, _, at), chosen, value in zip(job.writes, job.chosen, (job.value, *job.more), strict=False):
            space = self.world.spaces[key]
            space.writer[at] = -1
            raw = flat_bytes(value).numpy()
            space.bytes[chosen], space.written[chosen] = raw, True
