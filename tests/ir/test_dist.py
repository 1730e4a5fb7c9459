"""Collectives: what they mean on all ranks, their types, the bytes they send."""

from __future__ import annotations

import pytest
import torch

from tessera.distributed.in_step import cut, join, run
from tessera.ir.builder import Builder
from tessera.ir.dist import bytes_sent, on
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.ir.types import TensorType, contiguous_strides
from tessera.ir.verify import verify
from tessera.transforms.shard.paths import path
from tessera.util.errors import InputError

MESH = Mesh.of(dp=2, tp=3)
PLACES = (
    "[12, 6]", "[12/dp, 6]", "[12/tp, 6]", "[12/tp/dp, 6]", "[12/dp, 6/tp]", "[12, 6] +dp", "[12/dp, 6] +tp",
    "[12, 6/tp] +dp", "[12, 6] +dp +tp",
)  # fmt: skip
UNEVEN = ("[7, 5]", "[7/dp, 5]", "[7/tp, 5/dp]", "[7/tp/dp, 5]", "[7, 5/tp] +dp", "[7, 5/dp/tp]")


def move(a: str, b: str) -> None:
    start, end = Placement.parse(a, MESH), Placement.parse(b, MESH)
    builder = Builder("f")
    shape = start.local_shape
    x = builder.input(
        "x", TensorType(torch.float64, shape, contiguous_strides(shape), torch.device("cpu")).placed(start)
    )
    y = x
    for step in path(start, end):
        given = builder.emit(getattr(on(MESH), step.name), y, *step.args)
        y = type(x)(given.name, given.type.placed(step.after))
        builder.equations[-1] = builder.equations[-1].with_(outputs=(y,))
    trace = verify(builder.finish([y]))
    whole = torch.randn([int(n) for n in start.shape], dtype=torch.float64)
    (parts,) = run(trace, [cut(whole, start)])
    torch.testing.assert_close(join(parts, end), whole)


@pytest.mark.parametrize("places", [PLACES, UNEVEN], ids=["even", "uneven"])
def test_every_change_of_placement(places: tuple) -> None:
    for a in places:
        for b in places:
            move(a, b)


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        ("[12/dp, 6]", "[12, 6]", ["all_gather"]),
        ("[12, 6]", "[12/dp, 6]", ["slice"]),
        ("[12, 6] +dp", "[12, 6]", ["all_reduce"]),
        ("[12, 6] +dp", "[12/dp, 6]", ["reduce_scatter"]),
        ("[12/dp, 6]", "[12, 6/dp]", ["all_to_all"]),
        ("[12, 6] +dp +tp", "[12/tp, 6]", ["reduce_scatter", "all_reduce"]),
        ("[12/tp/dp, 6]", "[12/tp, 6]", ["all_gather"]),
        ("[12, 6]", "[12, 6] +dp", ["once"]),
    ],
)
def test_the_shortest_way(a: str, b: str, names: list) -> None:
    assert [step.name for step in path(Placement.parse(a, MESH), Placement.parse(b, MESH))] == names


def test_bytes() -> None:
    builder = Builder("f")
    x = builder.input("x", TensorType(torch.float32, (6, 4), (4, 1), torch.device("cpu")))
    dist = on(MESH)
    builder.emit(dist.all_gather, x, 0, "tp")
    builder.emit(dist.reduce_scatter, x, 0, "tp")
    builder.emit(dist.all_reduce, x, "tp")
    builder.emit(dist.all_to_all, x, 0, 1, "tp")
    builder.emit(dist.permute, x, "tp")
    builder.emit(dist.slice, x, 0, "tp")
    whole = 6 * 4 * 4
    sent = [bytes_sent(eqn) for eqn in builder.equations]
    assert sent == [2 * whole, whole * 2 / 3, 2 * whole * 2 / 3, whole * 2 / 3, whole, 0]


def test_permute_is_a_turn() -> None:
    builder = Builder("f")
    x = builder.input(
        "x", TensorType(torch.float32, (1,), (1,), torch.device("cpu")).placed(Placement.parse("[3/tp]", MESH))
    )
    out = builder.emit(on(MESH).permute, x, "tp", 1)
    (parts,) = run(builder.finish([out]), [[torch.tensor([float(r)]) for r in range(6)]])
    assert [float(p) for p in parts] == [2, 0, 1, 5, 3, 4]


def test_ranks_that_differ_are_found() -> None:
    parts = [torch.zeros(2)] * 5 + [torch.ones(2)]
    with pytest.raises(InputError, match="rank 5 holds something else"):
        join(parts, Placement.parse("[2]", MESH))


def test_without_a_group() -> None:
    with pytest.raises(InputError, match="torchrun --nproc-per-node=6"):
        on(MESH).all_reduce.fn(torch.zeros(2), "dp")
