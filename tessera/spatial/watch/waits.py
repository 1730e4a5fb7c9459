"""What each instruction waited for.

In: what the simulator judged. Out: for an instruction, the other one that kept it from beginning earlier: who wrote
what it reads, who still used what it overwrites, or who held a unit, port, bank or link of its. From these the
critical path: instructions, each waiting for the one before, up to the last that ends.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tessera.machines.spatial import Core
from tessera.spatial.listing.types import FromHost, Hosted, Load, Recv, ToHost
from tessera.spatial.simulator.claims import Resource
from tessera.spatial.simulator.judge import Judged
from tessera.spatial.simulator.work import Work


@dataclass(frozen=True)
class Wait:
    """`kind` is one of `RANK`; `until` is the cycle from which the other was no longer in the way."""

    kind: str
    work: Work
    until: int


RANK = ("arrival", "data", "link", "unit", "port", "bank", "room")  # which is named, of those that end together


class Waits:
    def __init__(self, judged: Judged) -> None:
        self.judged = judged
        self.touched: dict[tuple[Core | None, str], list[tuple[Work, bool]]] = defaultdict(list)  # None: at the host
        self.held: dict[int, list[tuple[Resource, int]]] = defaultdict(list)  # of a work: resources, and which claim
        self.sends = {id(recv): flow.send for flow in judged.flows.values() for recv in flow.recvs}
        for work in judged.works:
            for key, writes in _touches(work):
                self.touched[key].append((work, writes))
        self.claims = {resource: sorted(users, key=lambda c: c.begin) for resource, users in judged.claims.items()}
        for resource, users in self.claims.items():
            for number, claim in enumerate(users):
                self.held[id(claim.work)].append((resource, number))

    def wait(self, work: Work, apart_from: Resource | None = None) -> Wait | None:
        """The last thing that was in the way; None for what could begin at once."""
        waits = [*self.of_data(work), *self.of_resources(work, apart_from)]
        return max(waits, key=lambda w: (w.until, -RANK.index(w.kind)), default=None)

    def of_data(self, work: Work) -> list[Wait]:
        start = work.step.of.start
        if (send := self.sends.get(id(work))) is not None:
            return [Wait("arrival", send, start)]
        waits = []
        for key, writes in _touches(work):
            for other, wrote in self.touched[key]:
                if other is not work and other.end <= start and (wrote or writes):
                    comes = isinstance(other.step.of.action, Recv | Load | Hosted)
                    kind = "room" if writes else "arrival" if comes else "data"
                    waits.append(Wait(kind, other, other.end))
        return waits

    def of_resources(self, work: Work, apart_from: Resource | None) -> list[Wait]:
        waits = []
        for resource, number in self.held[id(work)]:
            if number and resource != apart_from:
                before, mine = self.claims[resource][number - 1 : number + 1]
                waits.append(Wait(resource.kind, before.work, work.step.of.start - (mine.begin - before.end)))
        return waits

    def critical_path(self) -> list[tuple[Work, str]]:
        """From the first instruction to the last one, each with what kind of thing it waited for."""
        if not self.judged.works:
            return []
        work = max(self.judged.works, key=lambda w: (w.end, -w.step.of.start, w.step.core))
        path = []
        seen: set[int] = set()
        while id(work) not in seen:
            seen.add(id(work))
            wait = self.wait(work)
            path.append((work, wait.kind if wait else "start"))
            if wait is None:
                break
            work = wait.work
        return path[::-1]


def _touches(work: Work) -> list[tuple[tuple[Core | None, str], bool]]:
    """What an instruction reads and writes (True), on its core and at the host."""
    core = work.step.core
    touched: list[tuple[tuple[Core | None, str], bool]] = [((core, t.ref.name), False) for t in work.reads]
    touched += [((core, t.ref.name), True) for t in work.writes]
    touched += [((None, t.ref.name), False) for t in work.taken] + [((None, t.ref.name), True) for t in work.given]
    if work.place is not None and isinstance(work.step.of.action, FromHost | ToHost):
        touched.append(((None, work.place.ref.name), isinstance(work.step.of.action, ToHost)))
    return touched
