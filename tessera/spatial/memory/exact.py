"""Addresses by a solver, for small sets.

In: spans. Out: addresses of least height or None where none was found in time, and whether that is proven. ortools
is the extra `plan`; whoever can do without it asks `available` first.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence

from tessera.spatial.memory.span import Span
from tessera.util.errors import OptionError

LARGEST = 40  # spans
SECONDS = 5.0


def available() -> bool:
    return importlib.util.find_spec("ortools") is not None


def solve(spans: Sequence[Span], least: int, most: int, seconds: float = SECONDS) -> tuple[list[int] | None, bool]:
    """Addresses whose height lies between `least` and below `most`; whether no lower ones exist."""
    if not available():
        raise OptionError("CP-SAT is part of ortools, which is not installed: pip install tessera[plan]")
    if least >= most:
        return None, True
    unit = math.gcd(*(s.size for s in spans))  # addresses stay aligned as sizes are
    cp_model = importlib.import_module("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    height = model.new_int_var(-(-least // unit), (most - 1) // unit, "height")
    places, times, rows = [], [], []
    for i, s in enumerate(spans):
        size = s.size // unit
        at = model.new_int_var(0, (most - 1) // unit - size, f"at{i}")
        model.add(at + size <= height)
        places.append(at)
        times.append(model.new_fixed_size_interval_var(s.start, s.end - s.start, f"t{i}"))
        rows.append(model.new_fixed_size_interval_var(at, size, f"a{i}"))
    model.add_no_overlap_2d(times, rows)
    model.minimize(height)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, status == cp_model.INFEASIBLE
    return [unit * int(solver.value(at)) for at in places], status == cp_model.OPTIMAL
