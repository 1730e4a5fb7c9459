"""Where values lie on a mesh: text both ways, sizes on one rank, and what the verifier says of them."""

from __future__ import annotations

import pytest
import torch

from tessera.ir.builder import Builder, aten
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement, parse_splits
from tessera.ir.serial import Reader, Writer
from tessera.ir.types import TensorType, contiguous_strides
from tessera.ir.verify import verify
from tessera.util.errors import OptionError, VerifyError

MESH = Mesh.of(dp=4, tp=2)


@pytest.mark.parametrize(
    "text",
    ["[]", "[8]", "[8/dp, 4096/tp, 1024]", "[3072/tp/dp, 1024]", "[8/dp, 16] +tp", "[8] +dp max:tp", "[5/tp] min:dp"],
)
def test_text_both_ways(text: str) -> None:
    assert str(Placement.parse(text, MESH)) == text


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("[8/dp, 4096/tp, 1024]", (2, 2048, 1024)),
        ("[3072/tp/dp, 1024]", (384, 1024)),
        ("[10/dp]", (3,)),  # chunks of 3, 3, 3 and 1
        ("[5/dp, 3/tp]", (2, 2)),
        ("[8] +tp", (8,)),
    ],
)
def test_sizes_on_a_rank(text: str, local: tuple) -> None:
    assert Placement.parse(text, MESH).local_shape == local


def test_ranks_and_places() -> None:
    assert [MESH.coordinates(5)[axis] for axis in ("dp", "tp")] == [2, 1]
    assert MESH.rank({"dp": 2, "tp": 1}) == 5 and MESH.ranks == 8
    assert MESH.peers(5, "dp") == [1, 3, 5, 7] and str(MESH) == "dp=4 tp=2"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8/dp", "expected a placement such as"),
        ("[8/xp]", "expected an axis of the mesh dp=4 tp=2, got 'xp'"),
        ("[8/dp, 8/dp]", "got dp twice"),
        ("[8/dp] +dp", "got dp twice"),
        ("[8] tp", "expected \\+axis"),
        ("[b/dp]", "expected sizes in numbers"),
        ("[8/]", "expected dimensions such as"),
    ],
)
def test_bad_text(text: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Placement.parse(text, MESH)


@pytest.mark.parametrize(("axes", "says"), [({"d p": 2}, "names such as"), ({"dp": 0}, "1 rank or more")])
def test_bad_mesh(axes: dict, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Mesh.of(axes)


def test_words_of_a_plan() -> None:
    assert parse_splits("f/tp, d") == (["f", "d"], (("tp",), ()))


def placed(text: str) -> TensorType:
    placement = Placement.parse(text, MESH)
    shape = placement.local_shape
    return TensorType(torch.float32, shape, contiguous_strides(shape), torch.device("cpu")).placed(placement)


def program(given: str, result: str):
    builder = Builder("f")
    x = builder.input("x", placed(given))
    with builder:
        y = aten.neg(x)
    y_placed = builder.value("y", placed(result))
    builder.equations[-1] = builder.equations[-1].with_(outputs=(y_placed,))
    assert y is not None
    return builder.finish([y_placed])


def test_types_print_their_place() -> None:
    text = str(program("[8/dp, 4]", "[8/dp, 4]"))
    assert "# mesh dp=4 tp=2" in text and "# x: f32[2, 4]  [8/dp, 4]" in text


def test_the_verifier_checks_sizes() -> None:
    verify(program("[8/dp, 4]", "[8/dp, 4]"))
    with pytest.raises(VerifyError, match="that is \\[1, 4\\]"):
        wrong = program("[8/dp, 4]", "[8/dp, 4]")
        (eqn,) = wrong.equations
        moved = placed("[8/dp, 4]").placed(Placement.parse("[4/dp, 4]", MESH))
        y = type(eqn.out)("y", moved)
        verify(wrong.with_(equations=(eqn.with_(outputs=(y,)),), outputs=(y,)))


def test_stored_types_keep_their_place() -> None:
    writer = Writer()
    number = writer.trace(program("[8/dp, 6/tp]", "[8/dp, 6/tp]"))
    again = Reader(writer.tables()).trace(number)
    assert [str(v.type) for v in again.values()] == ["f32[2, 3]  [8/dp, 6/tp]"] * 2
