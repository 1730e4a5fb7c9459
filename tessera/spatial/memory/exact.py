"""Addresses by a solver, for small sets.

In: spans. Out: addresses of least height or None where none was found with the effort given, and whether that is
proven. ortools is the extra `plan`; whoever can do without it asks `missing` first. Effort is counted in the solver's
own seconds, which are the same everywhere: so a seed gives the same layout on a busy computer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.spatial.memory.span import Span
from tessera.spatial.solvers import solver

LARGEST = 40  # spans
EFFORT = 5.0


def solve(spans: Sequence[Span], least: int, most: int, effort: float = EFFORT) -> tuple[list[int] | None, bool]:
    """Addresses whose height lies between `least` and below `most`; whether no lower ones exist."""
    cp_model = solver("ortools")
    if least >= most:
        return None, True
    unit = math.gcd(*(s.size for s in spans))  # addresses stay aligned as sizes are
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
    search = cp_model.CpSolver()
    search.parameters.max_deterministic_time = effort
    search.parameters.num_workers = 1
    search.parameters.random_seed = 0
    status = search.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, status == cp_model.INFEASIBLE
    return [unit * int(search.value(at)) for at in places], status == cp_model.OPTIMAL
