"""Tiles as MLIR text: it reads back as the same program, and what is wrong is refused."""

from __future__ import annotations

import pytest
import torch

from tessera.spatial import interpreter
from tessera.spatial.dialect.text import parse, to_text
from tessera.spatial.errors import MapError
from tessera.spatial.map import map_onto
from tests.spatial.nets import Attention


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
