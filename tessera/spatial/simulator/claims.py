"""Who holds what, when: units, ports, banks and links, and the first two that meet.

In: works with their flows. Out: for every resource its holders in order. In a cycle a unit, a port and a link serve one
instruction; a bank is read by one and written by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.listing.types import Buffer, Recv, Send
from tessera.spatial.simulator.flows import Flow
from tessera.spatial.simulator.memory import distance
from tessera.spatial.simulator.violation import Violation
from tessera.spatial.simulator.work import UNIT, Work


class Claim(NamedTuple):
    begin: int
    end: int
    work: Work


class Resource(NamedTuple):
    kind: str  # unit, port, bank or link
    core: Core
    name: str


Claims = dict[Resource, list[Claim]]


def check_names(machine: SpatialMachine, exist: tuple[str, ...], work: Work) -> None:
    """The unit is one of the core's and of the right kind; the ports exist, and are those that are needed."""
    step = work.step
    units, action = step.of.units, step.of.action
    for unit in units:
        if unit not in exist:
            raise step.refuse("unit", f"expected a unit of this core ({', '.join(exist)}); got {unit}")
    wanted = UNIT.get(type(action))
    if wanted and (len(units) != 1 or units[0].rstrip("0123456789") != wanted):
        raise step.refuse("unit", f"expected {wanted}; got {'+'.join(units)}")
    limits = {"r": machine.sram.read_ports, "w": machine.sram.write_ports}
    counts = {"r": 0, "w": 0}
    for port in step.of.ports:
        kind, number = port[5], int(port[6:])
        counts[kind] += 1
        if number >= limits[kind]:
            raise step.refuse("port", f"expected sram.{kind}0 to sram.{kind}{limits[kind] - 1}; got {port}")
    if len(set(step.of.ports)) != len(step.of.ports):
        raise step.refuse("port", "expected every port once")
    for kind, used, word in (("r", bool(work.reads), "read"), ("w", bool(work.writes), "write")):
        if used != bool(counts[kind]):
            raise step.refuse("port", f"expected {'a' if used else 'no'} port to {word} by; got {counts[kind]}")
    if not isinstance(action, Send) and step.of.routes:
        raise step.refuse("route", "expected no route; this sends nothing")


def check_duration(machine: SpatialMachine, work: Work) -> None:
    if isinstance(work.step.of.action, Send | Recv):
        return  # of a flow, which takes one time for all
    took = max(1, work.unit_cycles, work.traffic(machine.sram.width))
    if work.step.of.duration != took:
        why = f"expected {took} cycles (unit {work.unit_cycles}, traffic {work.traffic(machine.sram.width)})"
        raise work.step.refuse("duration", f"{why}; got {work.step.of.duration}")


def claims(
    machine: SpatialMachine,
    works: list[Work],
    flows: Mapping[int, Flow],
    buffers: Mapping[Core, Mapping[str, Buffer]],
) -> Claims:
    held: Claims = defaultdict(list)
    links: dict[tuple[Core, Core], Resource] = {}
    for work in works:
        step, core = work.step, work.step.core
        direction = {Send: " out", Recv: " in"}.get(type(step.of.action), "")
        for unit in step.of.units:
            held[Resource("unit", core, unit + direction)].append(Claim(step.of.start, step.end, work))
        memory = Claim(work.begin, work.end, work)
        for port in step.of.ports:
            held[Resource("port", core, port)].append(memory)
        for bank in _banks(machine, work, buffers[core]):
            held[Resource("bank", core, bank)].append(memory)
        if direction == " out":
            for link in flows[id(work)].held:
                ends = link.source, link.target
                if ends not in links:
                    links[ends] = Resource("link", link.source, f"{link.source}>{link.target}")
                held[links[ends]].append(Claim(link.begin, link.end, work))
    return held


def _banks(machine: SpatialMachine, work: Work, buffers: Mapping[str, Buffer]) -> set[str]:
    """Of a buffer with several places, those of all."""
    size = machine.sram.bank_size
    names = set()
    for kind, tiles in (("read", work.reads), ("write", work.writes)):
        for tile in tiles:
            buffer = buffers[tile.ref.name]
            for place in range(buffer.turns):
                at = buffer.address + place * distance(machine, buffer)
                first, last = (at + offset for offset in tile.extent)
                names.update(f"{kind} of bank {bank}" for bank in range(first // size, last // size + 1))
    return names


def check_claims(held: Claims, every: int | None) -> None:
    """The first meeting of all, in one run or with the runs that begin before and behind it."""
    first: Violation | None = None
    for resource, users in held.items():
        users.sort(key=lambda claim: (claim.begin, claim.end))
        for a, b in _neighbours(users, every):
            if b.begin < a.end and (first is None or b.begin < first.cycle):
                why = f"expected one user of {resource.name}; got two"
                first = Violation(resource.kind, resource.core, b.begin, why, str(a.work.step), str(b.work.step))
    if first is not None:
        raise first


def _neighbours(users: list[Claim], every: int | None) -> Iterable[tuple[Claim, Claim]]:
    """Claims next to each other in time; where runs overlap, as each stands in a round of `every` cycles."""
    if every is None:
        return zip(users, users[1:], strict=False)
    rounds = sorted(
        (Claim(of.begin % every, of.begin % every + of.end - of.begin, of.work) for of in users),
        key=lambda claim: (claim.begin, claim.end),
    )
    again = rounds[0]._replace(begin=rounds[0].begin + every, end=rounds[0].end + every)
    return zip(rounds, [*rounds[1:], again], strict=True)
