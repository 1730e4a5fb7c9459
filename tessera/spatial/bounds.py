"""What no schedule, and what no mapping, can be faster than; computed apart from the scheduler.

`bound`: for the chosen tiles and cores. A resource is busy as long as all that holds it, over how many there are of
it; and each step ends after all that it waits for, however much is free. `limit`: for any mapping. All
multiplications over all arrays; what these read and write through the ports of all memories; all inputs and outputs
through the host's ports; weights that memory cannot hold through those of off-chip memory.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial import durations
from tessera.spatial.graph import Graph, Product
from tessera.spatial.maps import Map
from tessera.spatial.schedule import Schedule, capacity
from tessera.spatial.steps import Resource, Step, once
from tessera.spatial.streams import least_loaded


@dataclass(frozen=True)
class Bound:
    cycles: int
    reason: str

    def __str__(self) -> str:
        return f"{self.cycles:,} ({self.reason})"


def bound(steps: list[Step], machine: SpatialMachine) -> Bound:
    """The busiest resource, with what must come before and after what holds it; or the longest path."""
    early = _earliest(steps)
    late = _latest(steps)
    held: dict[Resource, list[tuple[int, int, int]]] = {}
    for step in steps:
        for use in step.uses:
            tail = late[step] - use.offset - use.duration
            held.setdefault(use.resource, []).append((early[step] + use.offset, use.duration * use.count, tail))
    best = Bound(max((early[s] + late[s] for s in steps), default=0), "the longest path")
    for key, jobs in held.items():
        count = capacity(key, machine)
        if count == 1:
            total = _one_at_a_time(jobs)
        else:
            work = math.ceil(sum(busy for _, busy, _ in jobs) / count)
            total = min(head for head, _, _ in jobs) + work + min(tail for _, _, tail in jobs)
        if total > best.cycles:
            best = Bound(total, _name(key))
    return best


def interval(schedule: Schedule, machine: SpatialMachine) -> tuple[float, float]:
    """Cycles between one batch and the next, from the first result to the last; and what the busiest resource takes of
    each, which no schedule can be faster than."""
    ends: dict[int, int] = {}
    busy: dict[Resource, int] = {}
    for step in schedule.steps:
        if step.kind == "to_host":
            ends[step.batch] = max(ends.get(step.batch, 0), schedule.starts[step] + step.end)
        for use in step.uses:
            busy[use.resource] = busy.get(use.resource, 0) + use.duration * use.count
    least = max(total / capacity(resource, machine) for resource, total in busy.items()) / len(ends)
    return (max(ends.values()) - min(ends.values())) / max(1, len(ends) - 1), least


def least_interval(steps: list[Step], machine: SpatialMachine, hosted: Collection[str]) -> Bound:
    """Between the beginnings of two runs: the busiest resource of a run, or the longest way between two that touch what
    there is only once."""
    busy: dict[Resource, int] = {}
    touched: dict[object, dict[Step, tuple[int, int]]] = {}
    for step in steps:
        for use in step.uses:
            busy[use.resource] = busy.get(use.resource, 0) + use.duration * use.count
        for key, begin, end in once(step, hosted):
            before = touched.setdefault(key, {}).get(step, (begin, end))
            touched[key][step] = min(before[0], begin), max(before[1], end)
    best = Bound(1, "a cycle")
    for key, total in busy.items():
        if (cycles := math.ceil(total / capacity(key, machine))) > best.cycles:
            best = Bound(cycles, _name(key))
    for key, touches in touched.items():
        if (cycles := _span(steps, touches)) > best.cycles:
            best = Bound(cycles, f"what runs keep: {key if isinstance(key, str) else getattr(key, 'name', '')}")
    return best


def _span(steps: list[Step], touches: dict[Step, tuple[int, int]]) -> int:
    """The least time from the first touch to the end of the last."""
    far: dict[Step, int] = {}
    most = 0
    for step in steps:
        ways = [far[b] + delay for b, delay in step.after if b in far]
        if step in touches:
            begin, end = touches[step]
            ways.append(-begin)
            most = max(most, max(ways) + end)
        if ways:
            far[step] = max(ways)
    return most


def _one_at_a_time(jobs: list[tuple[int, int, int]]) -> int:
    """The least time for jobs (head, duration, tail) on one machine that may interrupt them: whenever a job comes, the
    one with the longest tail goes on (Jackson). No schedule that may not interrupt is shorter."""
    jobs = sorted(jobs)
    waiting: list[tuple[int, int]] = []  # minus the tail, cycles left
    at = end = 0
    for i, (head, busy, tail) in enumerate(jobs):
        at = max(at, head)
        heapq.heappush(waiting, (-tail, busy))
        until = jobs[i + 1][0] if i + 1 < len(jobs) else math.inf
        while waiting and at < until:
            after, left = heapq.heappop(waiting)
            run = min(left, until - at)
            at += int(run)
            if run < left:
                heapq.heappush(waiting, (after, left - int(run)))
            else:
                end = max(end, at - after)
    return end


def _earliest(steps: list[Step]) -> dict[Step, int]:
    early: dict[Step, int] = {}
    for s in steps:
        early[s] = max((early[b] + delay for b, delay in s.after), default=0)
    return early


def _latest(steps: list[Step]) -> dict[Step, int]:
    """From the start of each step to the end, at least."""
    late = {s: s.end for s in steps}
    for s in reversed(steps):
        for b, delay in s.after:
            late[b] = max(late[b], delay + late[s])
    return late


def _name(resource: Resource) -> str:
    match resource:
        case ("unit" | "send" | "recv", core, name):
            return f"{name} of core {core}"
        case ("read" | "write", core):
            return f"{resource[0]} ports of core {core}"
        case ("bank_read" | "bank_write", core, region):
            return f"banks {region} of core {core}"
        case ("link", a, b):
            return f"link {a}>{b}"
    return str(resource)


def limit(graph: Graph, machine: SpatialMachine, cores: tuple[Core, ...], batches: int = 1) -> Bound:
    rows, columns = machine.matrix.rows, machine.matrix.columns
    arrays = len(cores) * machine.matrix.count * rows * columns
    work, written = 0.0, 0
    factors: dict[Map, int] = {}  # and their bytes
    for node in graph.nodes:
        if isinstance(node, Product):
            batch, m, k = node.x.shape
            passes = machine.matrix.passes.get(durations.dtype_name(node.dtype), 1)
            work += batch * m * k * node.w.shape[2] * passes
            # Each factor is read once: products that share one, or repeat it over a batch, may be one product.
            factors |= {m: m.size * node.dtype.itemsize for m in (node.x.uniform(), node.w.uniform())}
            written += node.home.nbytes
    best = Bound(math.ceil(batches * work / arrays), "multiplications over all arrays")
    sram = machine.sram
    for moved, ports, what in ((sum(factors.values()), sram.read_ports, "read"), (written, sram.write_ports, "write")):
        if (cycles := math.ceil(batches * moved / (len(cores) * ports * sram.width))) > best.cycles:
            best = Bound(cycles, f"what products {what}, through all {what} ports")
    hosts = sum(machine.has_host(core) for core in cores)
    if machine.host is not None and hosts:
        moved = sum(dtype.itemsize * graph.elements_read(home) for _, dtype, _, home in graph.inputs)
        moved += sum(dtype.itemsize * index.size for _, dtype, _, index in graph.outputs)
        cycles = math.ceil(batches * moved / (hosts * machine.host.width))
        if cycles > best.cycles:
            best = Bound(cycles, "inputs and outputs through the host's ports")
    if machine.dram is not None and (ports := sum(machine.has_dram(core) for core in cores)):
        cycles = math.ceil(least_loaded(graph, machine, cores) / (ports * machine.dram.width))
        if cycles > best.cycles:
            best = Bound(cycles, "weights that memory cannot hold, through the ports of off-chip memory")
    return best
