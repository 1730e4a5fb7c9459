"""Addresses by a solver, for small sets. In: spans. Out: addresses of least height, or None where none was found in
time.

ortools is the extra `plan`; without it nothing is solved here, and what the search found stands.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Protocol

LARGEST = 40  # spans
SECONDS = 5.0


class Sized(Protocol):
    @property
    def size(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


def available() -> bool:
    return importlib.util.find_spec("ortools") is not None


def solve(spans: Sequence[Sized], least: int, most: int) -> list[int] | None:
    """Addresses whose height lies between `least` and below `most`."""
    if not available() or least >= most:
        return None
    cp_model = importlib.import_module("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    height = model.new_int_var(least, most - 1, "height")
    places, times, rows = [], [], []
    for i, s in enumerate(spans):
        at = model.new_int_var(0, most - 1 - s.size, f"at{i}")
        model.add(at + s.size <= height)
        places.append(at)
        times.append(model.new_fixed_size_interval_var(s.start, s.end - s.start, f"t{i}"))
        rows.append(model.new_fixed_size_interval_var(at, s.size, f"a{i}"))
    model.add_no_overlap_2d(times, rows)
    model.minimize(height)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = SECONDS
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return [int(solver.value(at)) for at in places]
