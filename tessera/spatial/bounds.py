"""What no schedule, and what no mapping, can be faster than; computed apart from the scheduler.

`bound`: for the chosen tiles and cores. A resource is busy as long as all that holds it, over how many there are of
it; and each step ends after all that it waits for, however much is free. `limit`: for any mapping. All
multiplications over all arrays; all inputs and outputs through the host's ports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial import durations
from tessera.spatial.graph import Graph, Product
from tessera.spatial.schedule import capacity
from tessera.spatial.steps import Resource, Step


@dataclass(frozen=True)
class Bound:
    cycles: int
    reason: str

    def __str__(self) -> str:
        return f"{self.cycles:,} ({self.reason})"


def bound(steps: list[Step], machine: SpatialMachine) -> Bound:
    """The busiest resource, with what must come before it and after it; or the longest path."""
    early = _earliest(steps)
    late = _latest(steps)
    busy: dict[Resource, int] = {}
    first: dict[Resource, int] = {}
    last: dict[Resource, int] = {}
    for step in steps:
        for use in step.uses:
            key = use.resource
            busy[key] = busy.get(key, 0) + use.duration * use.count
            head, tail = early[step] + use.offset, late[step] - use.offset - use.duration
            first[key] = min(first.get(key, head), head)
            last[key] = min(last.get(key, tail), tail)
    best = Bound(max((early[s] + late[s] for s in steps), default=0), "the longest path")
    for key, cycles in busy.items():
        total = first[key] + math.ceil(cycles / capacity(key, machine)) + last[key]
        if total > best.cycles:
            best = Bound(total, _name(key))
    return best


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


def limit(graph: Graph, machine: SpatialMachine, cores: tuple[Core, ...]) -> Bound:
    rows, columns = machine.matrix.rows, machine.matrix.columns
    arrays = len(cores) * machine.matrix.count * rows * columns
    work = 0.0
    for node in graph.nodes:
        if isinstance(node, Product):
            batch, m, k = node.x.shape
            passes = machine.matrix.passes.get(durations.dtype_name(node.dtype), 1)
            work += batch * m * k * node.w.shape[2] * passes
    best = Bound(math.ceil(work / arrays), "multiplications over all arrays")
    hosts = sum(machine.has_host(core) for core in cores)
    if machine.host is not None and hosts:
        moved = sum(dtype.itemsize * graph.elements_read(home) for _, dtype, _, home in graph.inputs)
        moved += sum(dtype.itemsize * index.size for _, dtype, _, index in graph.outputs)
        cycles = math.ceil(moved / (hosts * machine.host.width))
        if cycles > best.cycles:
            best = Bound(cycles, "inputs and outputs through the host's ports")
    return best
