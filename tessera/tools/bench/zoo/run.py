"""Which measurements of the zoo are made, each in a process of its own with a time limit.

In: options. Out: `Results`, in the file after every measurement. A crash, too little memory or a compiler that hangs
costs one cell. After the deadline nothing is begun; a later run goes on from the file. With `jobs`, that many processes
compile side by side; they are timed one after another, when the last of them has compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tessera.tools.bench.model_contestants import EAGER, INDUCTOR, OURS
from tessera.tools.bench.zoo.child import in_children
from tessera.tools.bench.zoo.registry import Entry, entries
from tessera.tools.bench.zoo.results import Cell, Key, Results, code, here

Say = Callable[[str], None]
Work = tuple[Key, Entry]


@dataclass(frozen=True)
class Options:
    """What to measure. After `deadline` seconds nothing is begun; after `limit` seconds a measurement is stopped.

    `jobs` processes compile at the same time. More than one disturb each other's first calls and measured choices.
    """

    only: tuple[str, ...] = ()
    held: bool = False
    who: tuple[str, ...] = (EAGER, INDUCTOR, OURS)
    device: str = "cuda"
    tiny: bool = False
    rounds: int = 7
    deadline: float | None = None
    limit: float = 300.0
    resume_ours: bool = False
    retry: bool = False
    jobs: int = 1
    kernels: int = 0  # so many of a step's kernels are named, those that take the most time

    def entries(self) -> list[Entry]:
        return entries(self.tiny, self.only, self.held)

    def order(self, entry: Entry, who: str) -> dict[str, object]:
        """What a process is told to measure."""
        told = {"name": entry.name, "who": who, "tiny": self.tiny, "device": self.device}
        return {**told, "rounds": self.rounds, "kernels": self.kernels}


def run(options: Options, results: Results, say: Say, done: Callable[[Cell], None] = lambda cell: None) -> list[str]:
    """Fill `results` with what was asked for. Out: the names of what there was no time for."""
    start, place, sources = time.monotonic(), here(options.device), code()
    open_work = _open_work(options, results, place)
    while open_work and (options.deadline is None or time.monotonic() - start < options.deadline):
        together, open_work = open_work[: options.jobs], open_work[options.jobs :]
        say("; ".join(f"{name} {size}: {who}" for (name, size, _, who), _ in together))
        figures = in_children([options.order(entry, key[-1]) for key, entry in together], options.limit)
        for (key, entry), one in zip(together, figures, strict=True):
            cell = Cell(*key, entry.definition, place, code=sources, beside=len(together), **one)
            results.add(cell)
            done(cell)
    return [f"{entry.name} {key[-1]}" for key, entry in open_work]


def _open_work(options: Options, results: Results, place: dict[str, str]) -> list[Work]:
    """What the file does not know. Side by side stand measurements of one contestant, which take about as long."""
    work: list[Work] = []
    for entry in options.entries():
        for who in options.who:
            key = (entry.name, entry.job.size, options.device, who)
            if known := results.reusable(key, entry, place, options.resume_ours, options.retry):
                results.show(known)
            else:
                work.append((key, entry))
    return sorted(work, key=lambda one: options.who.index(one[0][-1])) if options.jobs > 1 else work
