"""Layouts of random sets of lifetimes, and of files, against the least height that any layout has.

    python -m tests.spatial.lifetimes 5000           random sets of 3 to 30 lifetimes
    python -m tests.spatial.lifetimes --folder DIR   instances as MiniMalloc has them: NAME.CAPACITY.csv, which hold
                                                     rows of id, first moment, last moment, size

Where the layout is higher than what lives at once, CP-SAT is asked whether a lower one exists (ortools, the extra
`plan`); without it the canonical search's own proof is taken.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from pathlib import Path

from tessera.spatial.memory import exact
from tessera.spatial.memory.allocate import Placed, allocate
from tessera.spatial.memory.check import Laid, check
from tessera.spatial.memory.span import Span, pressure
from tessera.spatial.solvers import missing

SHARES = (1.1, 1.05, 1.02, 1.01)  # of a capacity that was not reached: heights that are tried one after the other


def random_spans(seed: int, count: int) -> list[Span]:
    chance = random.Random(seed)
    spans = []
    for _ in range(count):
        start = chance.randrange(100)
        spans.append(Span(32 * chance.randrange(1, 20), start, start + chance.randrange(1, 40)))
    return spans


def prove(spans: list[Span], placed: Placed, align: int = 32) -> None:
    pairs = enumerate(zip(spans, placed.addresses, strict=True))
    check([Laid(str(i), a, s.size, s.start, s.end) for i, (s, a) in pairs], 0, placed.height, align)


def least(spans: list[Span], placed: Placed) -> int | None:
    """The height of the lowest layout, or None where nobody could prove one."""
    if placed.height == pressure(spans):
        return placed.height
    if missing("ortools"):
        return placed.height if placed.proven else None
    lower, proven = exact.solve(spans, pressure(spans), placed.height, effort=60)
    if lower is not None and proven:
        return max(a + s.size for a, s in zip(lower, spans, strict=True))
    return placed.height if proven else None


def random_sets(count: int) -> None:
    optimal, unknown, worst = 0, 0, 1.0
    for seed in range(count):
        spans = random_spans(seed, 3 + seed % 28)
        placed = allocate(spans)
        prove(spans, placed)
        lowest = least(spans, placed)
        unknown += lowest is None
        optimal += lowest == placed.height
        worst = max(worst, placed.height / (lowest or pressure(spans)))
    print(f"{count} sets: {optimal} proven optimal, {unknown} open, at worst {worst:.4f} of the least")


def folder(path: Path, nodes: int) -> None:
    for file in sorted(path.glob("*.csv")):
        capacity = int(file.name.split(".")[1])
        rows = list(csv.DictReader(file.open()))
        spans = [Span(int(row["size"]), int(row["lower"]), int(row["upper"])) for row in rows]
        begun = time.process_time()
        placed = allocate(spans, capacity, nodes=nodes)
        for share in SHARES if placed.height > capacity else ():
            if (lower := allocate(spans, int(share * capacity), nodes=nodes // 40)).height < placed.height:
                placed = lower
        prove(spans, placed, 1)
        taken = time.process_time() - begun
        share = placed.height / capacity
        print(f"{file.name}: {len(spans)} buffers, {share:.4f} of the capacity, {taken:.1f} CPU-s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=500)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--nodes", type=int, default=500_000, help="of the canonical search, with --folder")
    args = parser.parse_args()
    folder(args.folder, args.nodes) if args.folder else random_sets(args.count)
