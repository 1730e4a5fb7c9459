"""What no mapping holds is computed again near a reader far away, and says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessera.machines.find import spatial_machine
from tessera.machines.spatial import SpatialMachine
from tessera.machines.spatial.read import vary
from tessera.spatial import mapping
from tessera.spatial.bounds import Bound
from tessera.spatial.capture import captured
from tessera.spatial.cuts import Effort
from tessera.spatial.errors import SpaceError
from tessera.spatial.map import map_onto
from tessera.spatial.program import program as spatial_program
from tessera.spatial.recompute import recomputed
from tessera.spatial.routes import Routes
from tessera.spatial.simulator.api import simulate


class Laterals(nn.Module):
    """Maps of one input, made first, as pyramids of features make them; the way down takes them in one by one."""

    def __init__(self, twice: bool, narrow: int = 4, wide: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.twice = twice
        self.up = nn.ModuleList(nn.Linear(narrow, wide) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(wide, wide) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = [torch.tanh(up(x)) for up in self.up]
        y = torch.stack(maps).mean(0) if self.twice else maps[-1]
        for down, m in zip(self.down, reversed(maps), strict=True):
            y = F.gelu(down(y)) + m
        return y


def small(size: int) -> SpatialMachine:
    return vary(spatial_machine("toy"), {"sram.size": f"{size} B"}, "small")


def test_what_does_not_fit_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Laterals(twice=False), torch.randn(128, 4)
    # Of all efforts those that matter here: the others are refused as well, and take their time.
    every = mapping.efforts
    monkeypatch.setattr(mapping, "efforts", lambda *args: [e for e in every(*args) if e.window == 4][:1])
    program = map_onto(model, x, machine=small(8704), effort="quick")
    assert "recomputed: linear_2 (8,192 bytes) for add_1, " in program.summary()
    assert "because core 0,0 of small needs" in program.summary()
    run = simulate(program, x)
    assert run.cycles == program.cycles >= program.bound >= program.limit
    torch.testing.assert_close(run.output, model(x), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(mapping, "recomputed", lambda graph: (graph, ()))
    with pytest.raises(SpaceError, match="small needs"):
        map_onto(model, x, machine=small(8704), effort="quick")


def test_a_value_with_an_early_reader_is_computed_twice() -> None:
    torch.manual_seed(0)
    model, x, machine = Laterals(twice=True), torch.randn(16, 4), spatial_machine("toy")
    graph = captured(model, (x,), {}).graph
    before = len(graph.nodes)
    other, values = recomputed(graph)
    assert len(values) >= 2 and len(other.nodes) > len(graph.nodes) == before
    routes = Routes(machine, machine.cores())
    mapped = mapping.one(other, machine, routes, Effort(len(routes.cores), 1 << 12, window=4, regions=1))
    run = simulate(spatial_program(mapped, machine, Bound(0, ""), None), x)
    torch.testing.assert_close(run.output, model(x), rtol=1e-5, atol=1e-5)


class Rows(nn.Module):
    """A row of a cache is read before and behind it is written."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(64, 16))
        self.wide = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        old = self.cache[at]
        self.cache[at] = x
        return self.wide(F.gelu(self.wide(x))) + old


def test_what_reads_a_state_is_not_computed_again() -> None:
    graph = captured(Rows(), (torch.randn(8, 16), torch.arange(8)), {}).graph
    assert not any("cache" in str(value) or "index" in str(value) for value in recomputed(graph)[1])
