"""Some random programs on random machines; the script beside this tries a thousand."""

from __future__ import annotations

import pytest
import torch

import tessera
from tessera.spatial import solvers
from tessera.spatial.mapping import best
from tessera.spatial.schedule import polished
from tessera.spatial.windows import windowed
from tests.spatial.nets import toy
from tests.spatial.optimum import graph_of, ratios
from tests.spatial.random_programs import attempt
from tests.spatial.test_solvers import without

needs_ortools = pytest.mark.skipif(bool(solvers.missing("ortools")), reason="CP-SAT is part of the extra plan")


@pytest.mark.parametrize("start", range(0, 30, 5))
def test_random_programs(start: int) -> None:
    assert [problem for seed in range(start, start + 5) if (problem := attempt(seed))] == []


@pytest.mark.sweep
@pytest.mark.parametrize("start", range(30, 330, 30))
def test_more_random_programs(start: int) -> None:
    assert [problem for seed in range(start, start + 30) if (problem := attempt(seed))] == []


@needs_ortools
def test_small_schedules_are_nearly_the_shortest() -> None:
    assert all(ratio <= 1.05 for _, ratio, _ in ratios(4, seed=7))


@needs_ortools
def test_windows_of_a_schedule_that_are_solved_make_it_shorter() -> None:
    graph, machine, cores = graph_of(7, (8, 17, 24), (5, 17, 33))
    listed = polished(best(graph, machine, cores, 1, 0).schedule, machine)
    solved = windowed(listed, machine, 0)
    assert solved.cycles < listed.cycles
    for step, start in solved.starts.items():
        assert all(start >= solved.starts[before] + delay for before, delay in step.after)


def test_without_ortools_windows_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(8, 8)
    monkeypatch.setattr(solvers, "_found", without)
    plain = tessera.map_onto(model, torch.randn(4, 8), machine=toy(1, 2), effort="thorough")
    assert "windows of the schedule are not solved: CP-SAT is part of ortools, which is not" in plain.summary()
    assert tessera.simulate(plain, torch.randn(4, 8)).cycles == plain.cycles
