"""The zoo: every network by its name, which are held back from tuning, and the jobs that are measured.

Ten networks are held back: those whose names have the smallest sha256. Nobody chose them, and whoever makes a compiler
faster looks at the others alone; the geometric mean over the ten says what that is worth elsewhere.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tessera.tools.bench.model_jobs import Job
from tessera.tools.bench.zoo.network import Network, job
from tessera.tools.bench.zoo.registry_library import DECODERS, ENCODERS, VISION
from tessera.tools.bench.zoo.registry_own import OWN

HELD_BACK = 10
ZOO: dict[str, Network] = {network.name: network for network in (*DECODERS, *ENCODERS, *VISION, *OWN)}


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def held_back(names: list[str]) -> frozenset[str]:
    return frozenset(sorted(names, key=digest)[:HELD_BACK])


HELD = held_back(list(ZOO))


@dataclass(frozen=True)
class Entry:
    """A job of the zoo: a network in training or inference, at one of its sizes."""

    network: Network
    kind: str
    tiny: bool

    @property
    def name(self) -> str:
        return self.network.title(self.kind)

    @property
    def job(self) -> Job:
        return job(self.network, self.kind, self.tiny)

    @property
    def held(self) -> bool:
        return self.network.name in HELD

    @property
    def definition(self) -> str:
        return self.network.definition(self.kind, self.tiny)


def entries(tiny: bool, only: tuple[str, ...] = (), held: bool = False) -> list[Entry]:
    """What is measured, in order. A network's name in `only` stands for all its jobs."""
    everything = [Entry(network, kind, tiny) for network in ZOO.values() for kind in network.kinds]
    return [
        entry
        for entry in everything
        if (not only or entry.name in only or entry.network.name in only) and (entry.held or not held)
    ]
