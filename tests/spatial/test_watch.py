"""Watching: cycles as they were, causes that add up, metrics that other programs read."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tessera.spatial.map import map_onto
from tessera.spatial.program import SpatialProgram
from tessera.spatial.simulator.judge import judge
from tessera.spatial.watch.gap import busiest, split
from tessera.spatial.watch.metrics import fullest, levels, metrics
from tessera.spatial.watch.waits import Waits
from tests.spatial.cases import cases, machines, models, read, row
from tests.spatial.listings import CASES
from tests.spatial.nets import MLP, toy


@pytest.mark.parametrize("machine", machines())
def test_cycles_are_as_they_were(machine: str) -> None:
    """`python -m tests.spatial.cases` writes the table anew."""
    known = read()
    assert len(known) == len(machines()) * len(models()) >= 40
    for name, build in cases():
        if not name.endswith(f" on {machine}"):
            continue
        program = build()
        assert row(name, program) == known[name]
        judged = judge(program.listing, program.machine)
        seen = metrics(program, judged)
        # The causes add up to the gap, and none is less than nothing.
        assert sum(seen.gap.values()) == program.cycles - program.bound and min(seen.gap.values()) >= 0, name
        waits = Waits(judged)
        path = waits.critical_path()
        assert path[-1][0].end == program.cycles and path[0][1] == "start"
        for (before, _), (work, kind) in zip(path, path[1:], strict=False):
            wait = waits.wait(work)
            assert wait is not None and wait.work is before and wait.kind == kind and wait.until <= work.step.of.start
        assert all(0 <= share <= 1 for share in seen.busy.values()) and 0 <= seen.matrix_use <= 1


def program() -> SpatialProgram:
    torch.manual_seed(0)
    return map_onto(MLP(32, 64), torch.randn(16, 32), machine=toy(2, 2), effort="quick")


def gap(case: str, bound: int | None = None) -> dict[str, int]:
    """Of a listing written by hand; the bound is what its busiest resource takes, unless it is given."""
    program = CASES[case]().program
    waits = Waits(judge(program.listing, program.machine))
    found = busiest(waits)
    assert found is not None
    causes = split(waits, program.listing.end, found[1] if bound is None else bound)
    return {cause: cycles for cause, cycles in causes.items() if cycles}


def test_the_cause_of_a_gap_is_named() -> None:
    # One core, whose write port is busy all the time but for the 32 cycles in which the result leaves.
    assert gap("mlp on one core") == {"imbalance": 32} and gap("mlp on one core", 548) == {}
    # Two cores: the first one waits for what the other sends back.
    assert gap("int8 on two cores")["link"] > 0


def test_metrics_are_json_and_prometheus() -> None:
    seen = metrics(program())
    data = json.loads(json.dumps(seen.data()))
    assert data["cycles"] == seen.cycles and set(data["busy"]) >= {"unit", "port", "link"}
    lines = seen.prometheus().splitlines()
    number = r'tessera_spatial_\w+\{\w+="[^"]*"(,\w+="[^"]*")*\} [-+.e\d]+'
    assert all(line.startswith("# ") or re.fullmatch(number, line) for line in lines)
    assert f'tessera_spatial_cycles{{machine="toy2x2"}} {seen.cycles}' in lines
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types)), "a metric's lines stand together"
    joules = sum(float(line.split()[-1]) for line in lines if line.startswith("tessera_spatial_energy_joules"))
    assert joules == pytest.approx(seen.report.joules) and seen.joules_a_token(16) == pytest.approx(joules / 16)
    assert "gap     dependence" in str(seen)


def test_memory_over_time() -> None:
    of = program()
    page = of.listing.pages[0]
    steps = levels(page, of.cycles)
    always = sum(b.size for b in page.buffers if b.lifetime is None)
    assert steps[-1][1] == 0 and all(level >= always for _, level in steps[:-1])
    assert fullest(page, of.cycles) <= max(b.address + b.size for b in page.buffers)
