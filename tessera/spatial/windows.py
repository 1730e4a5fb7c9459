"""Windows of a schedule, solved: some steps that follow each other are put in order anew by CP-SAT.

In: a schedule. Out: one that is not longer. What begins before a window stays; what begins behind it moves sooner, all
of it by as much as the window's steps allow, which is what the solver makes large. ortools is the extra `plan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.schedule import Pass, Schedule, capacity, polished
from tessera.spatial.solvers import missing, solver
from tessera.spatial.steps import Resource, Step, Use

SIZE, APART = 40, 20  # steps of a window, and from one window's first step to the next one's
MOST = 40  # windows
EFFORT = 1.0  # of the solver for a window, in its own seconds, which are the same everywhere


def windowed(best: Schedule, machine: SpatialMachine, least: int) -> Schedule:
    """A schedule that is not longer, and not shorter than `least`; the same one where ortools is not installed."""
    if missing("ortools"):
        return best
    after, uses = {s: s.after for s in best.steps}, {s: s.uses for s in best.steps}
    for first in _firsts(len(best.steps)):
        if best.cycles <= least:
            break
        order = sorted(best.steps, key=lambda s: (best.starts[s], s.number))
        starts = _solved(order, best, machine, first)
        if starts is not None:
            rank = {s: (0, starts[s]) for s in best.steps}
            tried = polished(Pass(best.steps, machine, after, uses, rank).run(), machine)
            best = min(best, tried, key=lambda of: of.cycles)
    return best


def _firsts(steps: int) -> Iterator[int]:
    """Where windows begin: all over the schedule, and where these are many, evenly."""
    firsts = range(0, max(1, steps - SIZE + APART), APART)
    yield from firsts[:: -(-len(firsts) // MOST)]


def _solved(order: list[Step], best: Schedule, machine: SpatialMachine, first: int) -> dict[Step, int] | None:
    """When each step begins if a window of `order` is put in order anew; None where nothing behind it is sooner."""
    known, inside, behind = best.starts, order[first : first + SIZE], order[first + SIZE :]
    low, high = known[inside[0]], known[inside[-1]]
    most = high - low + inside[-1].end
    for s in behind:
        most = min([most, *(known[s] - known[b] - delay for b, delay in s.after if known[b] < low)])
    for s in order[:first]:
        most = min(most, best.cycles - known[s] - s.end)
    if most <= 0:
        return None
    cp_model = solver("ortools")
    model = cp_model.CpModel()
    sooner = model.new_int_var(0, most, "sooner")
    starts: dict[Step, Any] = {s: known[s] for s in order[:first]} | {s: known[s] - sooner for s in behind}
    for s in inside:
        starts[s] = model.new_int_var(low, high, f"s{s.number}")
        model.add_hint(starts[s], known[s])
        model.add(starts[s] + s.end <= best.cycles - sooner)
    window = set(inside)
    for s in (*inside, *behind):
        for before, delay in s.after:
            if s in window or before in window:
                model.add(starts[s] >= starts[before] + delay)
    for resource, users in _users(order, first, known, most).items():
        times = []
        for s, use in users:
            at = starts[s] + use.offset
            times.append(model.new_interval_var(at, use.duration, at + use.duration, ""))
        model.add_cumulative(times, [use.count for _, use in users], capacity(resource, machine))
    model.maximize(sooner)
    search = cp_model.CpSolver()
    search.parameters.num_workers = 1
    search.parameters.random_seed = 0
    search.parameters.max_deterministic_time = EFFORT
    if search.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE) or not search.value(sooner):
        return None
    return {s: int(search.value(at)) for s, at in starts.items()}


def _users(order: list[Step], first: int, known: dict[Step, int], most: int) -> dict[Resource, list[tuple[Step, Use]]]:
    """Who may meet whom: the window's steps, what is still held when it begins, and of what is behind it all that may
    come so soon when it moves by `most`."""
    low, high = known[order[first]], known[order[first : first + SIZE][-1]]
    users: dict[Resource, list[tuple[Step, Use]]] = {}
    reach: dict[Resource, int] = {}
    for number, s in enumerate(order[: first + SIZE]):
        for use in s.uses:
            if (end := (known[s] if number < first else high) + use.offset + use.duration) > low:
                users.setdefault(use.resource, []).append((s, use))
                reach[use.resource] = max(end, reach.get(use.resource, 0))
    for s in order[first + SIZE :]:
        for use in s.uses:
            if known[s] + use.offset - most < reach.get(use.resource, -most):
                users[use.resource].append((s, use))
    return users
