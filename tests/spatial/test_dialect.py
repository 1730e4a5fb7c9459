"""Tiles as MLIR text: it reads back as the same program, and what is wrong is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tessera
from tessera.spatial import interpreter
from tessera.spatial.dialect.text import parse, to_text
from tessera.spatial.errors import MapError
from tessera.spatial.map import map_onto
from tessera.spatial.simulator.stepper import step
from tests.spatial.nets import MLP, Attention
from tests.spatial.test_chips import rack


@pytest.fixture(scope="module")
def program():
    torch.manual_seed(0)
    return map_onto(Attention(), torch.randn(1, 5, 32), machine="toy", effort="quick")


def test_round_trip(program) -> None:
    tiles = program.mapping.tiles
    text = to_text(tiles)
    again = parse(text, tiles.tensors)
    x = torch.randn(1, 5, 32)
    runs = [interpreter.run(t, program.machine, [x])[0] for t in (tiles, again)]
    assert runs[0].equal(runs[1])
    assert [t.name for t in again.tiles] == [t.name for t in tiles.tiles]
    assert program.stages["placed"] == text


def test_refusals(program) -> None:
    text, tensors = program.stages["placed"], program.mapping.tiles.tensors
    with pytest.raises(MapError, match="no part of"):
        parse(text.replace('["[0:5, 0:32]"', '["[0:6, 0:32]"', 1), tensors)
    with pytest.raises(MapError, match="not given beside"):
        parse(text, {})
    with pytest.raises(MapError, match="did you mean|expected a function"):
        parse(text.replace("rsqrt(", "rsqr(", 1), tensors)
    with pytest.raises(MapError, match="expected one spatial.program"):
        parse("builtin.module {\n}", tensors)
    with pytest.raises(MapError, match="expected a type out of .*; got 'float33'"):
        parse(text.replace("float32", "float33"), tensors)
    for core in ("7,7", "3:0,0", "999:0,0"):
        with pytest.raises(MapError, match=f"expected a core of toy that is alive, got {core}"):
            program.edited(text.replace('"0,0"', f'"{core}"'))
    with pytest.raises(MapError, match="expected a listing"):
        program.edited(str(program)).edited(text)


@pytest.mark.parametrize("effort", ["quick", "normal"])
def test_tiles_are_put_back(effort) -> None:
    """As they were they give the same listing, with lines and modules; of a pipeline with batches too."""
    torch.manual_seed(0)
    model, x = nn.Sequential(MLP(), MLP()), torch.randn(6, 64)
    for machine, more in (("toy", {}), (rack(), {"chips": 2, "cut": {"pipeline": 2, "batches": 3}})):
        program = map_onto(model, x, machine=machine, effort=effort, **more)
        again = program.edited(program.stages["placed"])
        assert again.stages["placed"] == program.stages["placed"] and again.bound <= again.cycles <= program.cycles
        assert effort == "quick" or str(again) == str(program)
        assert tessera.simulate(again, x).output.equal(tessera.simulate(program, x).output)


def test_edited_tiles_are_another_program() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)), torch.randn(8, 32)
    program = map_onto(model, x, machine="toy")
    edited = program.edited(program.stages["placed"].replace("gelu(", "relu("))
    ran = tessera.simulate(edited, x)
    assert ran.cycles == edited.cycles == step(edited.program, x)[1] and "relu(" in str(edited)
    torch.testing.assert_close(ran.output, model[2](torch.relu(model[0](x))).detach(), rtol=1e-5, atol=1e-5)
    # One that moves to another core while those that read it stay.
    with pytest.raises(MapError, match="has been previously used or defined with type"):
        line = next(line for line in program.stages["placed"].splitlines() if "spatial.multiply" in line)
        head, _, core = line.rpartition('"0,')
        program.edited(program.stages["placed"].replace(line, f'{head}"1,{core}'))
