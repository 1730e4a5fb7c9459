"""Random programs on random machines and on such with one field twice as good: none is slower there.

`python -m tests.spatial.better 100` tries that many; a second number is the first seed.
"""

from __future__ import annotations

import random
import sys

import torch

from tessera.spatial.codesign.fields import DIALS, changed, current, snapped
from tessera.spatial.errors import SpaceError
from tessera.spatial.map import map_onto
from tests.spatial.random_programs import Program, random_machine

FIELDS = (
    "vector.lanes", "matrix.count", "sram.size", "sram.width", "sram.read_ports", "sram.write_ports", "sram.banks",
    "copy.engines", "link.width", "link.latency", "link.jitter", "host.width", "dram.width", "dram.latency",
)  # fmt: skip


def attempt(seed: int) -> tuple[bool, str]:
    """Whether the better machine alone is slower; and what is wrong, with the tiles of the other one tried too."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    machine, width = random_machine(chance), chance.choice([8, 17, 24, 48])
    model = Program(chance, width).double()
    x = torch.randn((*chance.choice([(), (2,)]), chance.choice([2, 5, 17, 33]), width), dtype=torch.float64)
    dials = [DIALS[name] for name in FIELDS if name.partition(".")[0] != "dram" or machine.dram is not None]
    dial = chance.choice(dials)
    now = current(machine, dial)
    better = changed(machine, {dial.name: snapped(machine, dial, now / 2 if dial.less else 2 * max(now, 1))})
    effort = chance.choice(["quick", "normal"])
    try:
        least = map_onto(model, x, machine=machine, effort=effort).cycles
    except SpaceError:
        return False, ""
    try:
        alone = map_onto(model, x, machine=better, effort=effort).cycles
    except SpaceError:
        alone = sys.maxsize
    if alone <= least:
        return False, ""
    both = map_onto(model, x, machine=better, effort=effort, like=machine).cycles
    return True, f"{seed}: {dial.name} of {now}: {least} cycles, then {both}" if both > least else ""


if __name__ == "__main__":
    count, first = (int(arg) for arg in (*sys.argv[1:], "0")[:2])
    slower = wrong = 0
    for number in range(first, first + count):
        alone, problem = attempt(number)
        slower, wrong = slower + alone, wrong + bool(problem)
        if alone:
            print(problem or f"{number}: slower alone", flush=True)
    print(f"{count} programs, {slower} slower alone, {wrong} with both mappings")
    sys.exit(bool(wrong))
