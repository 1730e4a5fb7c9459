"""Cuts that are chosen: the integer program finds what trying everything finds, and what it chooses runs."""

from __future__ import annotations

import itertools
import math
import random
from itertools import pairwise

import pytest
import torch
from torch import nn

from tessera.spatial import solvers
from tessera.spatial.capture import captured
from tessera.spatial.choice.layers import problem
from tessera.spatial.choice.search import Problem, Shape, Way, best, staged
from tessera.spatial.map import map_onto
from tessera.spatial.solvers import missing
from tessera.util.errors import OptionError
from tests.spatial.nets import MLP, MoE
from tests.spatial.test_chips import agree, chips_of, rack
from tests.spatial.test_solvers import without

needs_highspy = pytest.mark.skipif(bool(missing("highspy")), reason="HiGHS is part of the extra plan")


def every(of: Problem) -> dict[tuple[Shape, tuple[Way, ...]], float]:
    """The least cost of each shape and choice of ways, by trying all stages."""
    least: dict[tuple[Shape, tuple[Way, ...]], float] = {}
    for shape, kinds in of.ways.items():
        for ways in itertools.product(*kinds):
            least[shape, ways] = math.inf
            for cuts in itertools.combinations(range(1, len(of.layers)), shape.pipeline - 1):
                stages = [[ways[k] for k in of.layers[a:b]] for a, b in pairwise((0, *cuts, len(of.layers)))]
                if all(sum(way.nbytes for way in stage) <= of.room for stage in stages):
                    took = [sum(way.cycles for way in stage) for stage in stages]
                    cost = max(took) if of.throughput else sum(took) + (shape.pipeline - 1) * shape.hop
                    least[shape, ways] = min(least[shape, ways], cost)
    return least


def problems(count: int) -> list[Problem]:
    chance, made = random.Random(0), []
    for number in range(count):
        kinds = chance.randint(1, 3)
        layers = (*range(kinds), *(chance.randrange(kinds) for _ in range(chance.randint(1, 4))))
        shapes = [Shape(4 // p, 1, p, chance.randint(0, 30)) for p in (1, 2, 4) if p <= len(layers)]
        draw = lambda: Way("", chance.randint(1, 100), chance.randint(1, 40))  # noqa: E731
        ways = {shape: [[draw() for _ in range(chance.randint(1, 3))] for _ in range(kinds)] for shape in shapes}
        made.append(Problem(layers, ways, chance.choice([15, 60, 100, 300]), bool(number % 2)))
    return made


def test_stages_are_the_best() -> None:
    for of in problems(30):
        for (shape, ways), least in every(of).items():
            found = staged(of, shape, ways)
            assert (math.inf if found is None else found.cost) == pytest.approx(least)


@needs_highspy
def test_the_integer_program_finds_the_best() -> None:
    refused = 0
    for of in problems(60):
        found, least = best(of), min(every(of).values())
        refused += found is None
        assert (math.inf if found is None else found.cost) == pytest.approx(least)
        assert found is None or found.proven
    assert 0 < refused < 30


def test_equal_layers_share_their_choice() -> None:
    model = nn.Sequential(*(MLP() for _ in range(4)), MLP(64, 32))
    asked, layers = problem(captured(model, (torch.randn(8, 64),), {}), rack(), 4, False)
    assert asked.layers == (0, 0, 0, 0, 1) and len(layers) == 5
    assert {(s.tensor, s.pipeline) for s in asked.ways} == {(4, 1), (2, 2), (1, 4)}
    whole, cut = (next(w for w in asked.ways[Shape(4, 1, 1, s.hop)][0] if w.name == name)
                  for name in ("whole", "cut") for s in [next(iter(asked.ways))])  # fmt: skip
    assert cut.nbytes < whole.nbytes / 3.5 and cut.cycles != whole.cycles
    asked, layers = problem(captured(MoE(), (torch.randn(12, 32),), {}), rack(), 4, False)
    assert {s.experts for s in asked.ways} == {1, 2, 4} and sum(layer.experts > 0 for layer in layers) == 1


class Uneven(nn.Module):
    """A small layer that is not worth a sum over chips, and a large one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = MLP(64, 16), MLP(64, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.small(x))


@needs_highspy
def test_what_is_chosen_runs() -> None:
    torch.manual_seed(0)
    model, x, machine = Uneven(), torch.randn(8, 64), rack(size='"256 KiB"')
    program = map_onto(model, x, machine=machine, chips=2, cut="best", effort="quick")
    agree(model, x, program)
    assert "tensor 2, 1 of 2 layers cut" in program.summary() and len(chips_of(program)) == 2
    sizes = {name: tuple(of.shape) for name, of in program.data.items()}
    assert sizes["small_up_weight_T"] == (64, 16) and sizes["large_up_weight_0_T"] == (64, 512)
    assert program.cycles < map_onto(model, x, machine=machine, chips=2, effort="quick").cycles


@needs_highspy
def test_throughput_wants_other_cuts_than_latency() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(MLP(64, 256) for _ in range(4))), torch.randn(16, 64)
    machine, found = rack(size='"256 KiB"'), {}
    for aim in ("latency", "throughput"):
        found[aim] = map_onto(model, x, machine=machine, chips=4, cut="best", aim=aim, effort="quick")
        agree(model, x, found[aim])
    assert "tensor 4" in found["latency"].choice and "pipeline 4" in found["throughput"].choice
    assert found["throughput"].interval < found["latency"].cycles < found["throughput"].cycles


def test_without_highspy_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "_found", without)
    x, machine = torch.randn(8, 64), rack()
    program = map_onto(MLP(), x, machine=machine, chips=2, cut="best", effort="quick")
    assert "every tensor is cut: HiGHS" in program.summary() and "tessera[plan]" in program.choice
    plain = map_onto(MLP(), x, machine=machine, chips=2, effort="quick")
    assert str(plain) == str(program) and not plain.choice
    with pytest.raises(OptionError, match="expected words and counts, 'best' or None, got 'fast'"):
        map_onto(MLP(), x, machine=machine, chips=2, cut="fast")
