"""Listings judged: everything that can be said of one without its data.

In: a listing and the machine. Out: what each instruction does, the flows between cores, who claims what, and a
`Report`; or one `Violation`. Checked in this order: machine, pages, instructions, flows, claims, memory, end.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from random import Random

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.listing.types import Listing, Load, Store, TensorType, ToHost
from tessera.spatial.simulator.claims import Claims, check_claims, check_duration, check_names, claims
from tessera.spatial.simulator.flows import Flow, flows
from tessera.spatial.simulator.memory import Access, check_accesses, check_buffers, check_kept, check_races
from tessera.spatial.simulator.report import Report, report
from tessera.spatial.simulator.violation import Step, Violation
from tessera.spatial.simulator.work import Work, Worker
from tessera.util.garbage import collection_paused


@dataclass(frozen=True)
class Judged:
    works: list[Work]
    flows: dict[int, Flow]
    claims: Claims
    report: Report


_known: dict[int, tuple[SpatialMachine, Judged]] = {}  # by the listing's identity, as long as somebody has it


def judged(listing: Listing, machine: SpatialMachine, jitter: int | None = None) -> Judged:
    """A listing judged once: it cannot change, and decoding runs the same one for every word."""
    if jitter is not None:
        return judge(listing, machine, jitter)
    known, of = _known.get(id(listing), (None, None))
    if of is None or known != machine:
        of = judge(listing, machine)
        _known[id(listing)] = machine, of
        weakref.finalize(listing, _known.pop, id(listing), None)
    return of


@collection_paused()
def judge(listing: Listing, machine: SpatialMachine, jitter: int | None = None) -> Judged:
    _check_machine(listing, machine)
    if listing.every is not None and listing.every < 1:
        raise Violation("end", None, 0, "expected a run every cycle at most; it says every 0")
    hosted = dict(listing.hosted)
    places = {"input": dict(listing.inputs) | hosted, "output": dict(listing.outputs) | hosted, "host": hosted}
    pages = {page.core: page for page in listing.pages}
    works: list[Work] = []
    of_core: dict[Core, list[Work]] = {}
    buffers = {page.core: {of.name: of for of in page.buffers} for page in listing.pages}
    for core, page in pages.items():
        check_buffers(machine, core, page.buffers, listing.every)
        places["dram"] = {of.name: of.type for of in listing.drams if of.chip == core.chip}
        worker = Worker(machine, buffers[core], places)
        mine = of_core[core] = [worker.work(Step(core, instruction)) for instruction in page.instructions]
        units = machine.units(core)
        for work in mine:
            check_names(machine, units, work)
            check_duration(machine, work)
        works += mine
    paired = flows(machine, works, None if jitter is None else Random(jitter))
    held = claims(machine, works, paired, buffers)
    check_claims(held, listing.every)
    for core, mine in of_core.items():
        check_accesses(core, buffers[core], mine, listing.every)
    _check_outside(listing, works)
    end = max((work.end for work in works), default=0)
    if listing.end != end:
        last = [str(work.step) for work in works if work.end == end][:1]
        raise Violation("end", None, end, f"expected the program to end at {end}; it says {listing.end}", *last)
    return Judged(works, paired, held, report(machine, works, paired, held, end))


def _check_machine(listing: Listing, machine: SpatialMachine) -> None:
    if listing.sha256 != machine.sha256:
        names = (listing.machine, listing.sha256), (machine.key, machine.sha256)
        have, want = (f"{name} {sha[:12]}" for name, sha in names)
        raise Violation("machine", None, 0, f"expected a program for {want}; it is for {have}")
    seen = set()
    for page in listing.pages:
        if not machine.network.alive(page.core) or page.core in seen:
            why = "expected a page for it once" if page.core in seen else f"expected a live core of {machine.key}"
            raise Violation("core", page.core, 0, why, f"line {page.line}: core {page.core}")
        seen.add(page.core)
        names = [buffer.name for buffer in page.buffers]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise Violation("buffer", page.core, 0, f"expected names of its own; {twice} is there twice")
    in_dram = [(of.name, of.type) for of in listing.drams]
    for kind in (listing.inputs + listing.hosted, listing.outputs + listing.hosted, in_dram):
        if len({name for name, _ in kind}) != len(kind):
            raise Violation(
                "bounds",
                None,
                0,
                "expected inputs, outputs and tiles at the host or off the chip with names of their own",
            )
    for chip in {of.chip for of in listing.drams}:
        needed = sum(of.type.bytes for of in listing.drams if of.chip == chip)
        room = machine.dram.size if machine.dram else 0
        if chip >= machine.chip_count or needed > room:
            raise Violation("buffer", None, 0, f"expected at most {room} bytes in off-chip memory; got {needed}")


def _check_outside(listing: Listing, works: list[Work]) -> None:
    """Off-chip memory and the host's have races too. An output that nobody sends, or a tensor at the host that is
    neither sent whole nor computed, is refused before memory is taken for it."""
    touched: dict[tuple[str, str], list[Access]] = {}
    sent = dict.fromkeys((name for name, _ in listing.outputs + listing.hosted), 0)
    hosted = {name for name, _ in listing.hosted}
    for work in works:
        action, places = work.step.of.action, [(of, False) for of in work.taken] + [(of, True) for of in work.given]
        if work.place is not None:
            places.append((work.place, isinstance(action, Store | ToHost)))
        for of, writes in places:
            off_chip = isinstance(action, Load | Store)
            if writes or off_chip or of.ref.name in hosted:
                access = Access(work.step.of.start, work.step.end, writes, of, work)
                touched.setdefault(("dram" if off_chip else "host", of.ref.name), []).append(access)
            if writes and not off_chip:
                sent[of.ref.name] += of.bytes
    for (place, name), accesses in touched.items():
        check_races(accesses)
        if listing.every is not None and (place == "dram" or name in hosted):  # outputs are each run's own
            check_kept(None, f"{place}.{name}", accesses, listing.every)
    for name, of in listing.outputs + listing.hosted:
        _check_sent(name, of, sent[name], listing.end)


def _check_sent(name: str, of: TensorType, sent: int, end: int) -> None:
    if sent < of.bytes:
        why = f"expected all of {name} to be sent to the host; {sent} of {of.bytes} bytes are"
        raise Violation("output", None, end, why, f"output {name} {of}")
