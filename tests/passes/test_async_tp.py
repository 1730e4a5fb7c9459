"""Products and exchanges in pieces: the same values and bytes, what is cut and what not, less is exposed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tessera.distributed import in_step
from tessera.frontends.functional.trace import trace_function
from tessera.inspection.timeline import timeline
from tessera.ir.dist import bytes_sent, is_collective
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.ir.trace import Trace
from tessera.ir.verify import verify
from tessera.machines import machine
from tessera.passes.memory.overlap import overlap
from tessera.passes.patterns.async_tp import async_tp
from tessera.transforms.shard.partition import shard


def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Two products of a gathered value, one before a scattered sum."""
    linear = torch.nn.functional.linear
    return linear(torch.relu(linear(x, gate)) * linear(x, up), down)


def sums(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Matrices of rows, whose products are added up before they are scattered."""
    rows = x.reshape(-1, x.shape[-1])
    a, b = torch.addmm(up[:, 0], rows, gate.t()), rows @ up.t()
    return (a @ gate).reshape(x.shape) + (b @ up).reshape(x.shape) + rows.sum(0)


SHAPES = ((2, 8, 4), (12, 4), (12, 4), (4, 12))
SPLITS = (((), ("tp",), ()), (("tp",), ()), (("tp",), ()), ((), ("tp",)))


def local(fn: Callable, ranks: int = 4, times: int = 1, device: str = "cpu") -> tuple[Trace, list, list]:
    """One rank's program, the whole tensors and where they lie; sizes are so many times larger."""
    mesh, draw = Mesh.of(tp=ranks), torch.Generator().manual_seed(0)
    shapes = [[n * times for n in shape] for shape in SHAPES]
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    if device == "cpu":
        tensors = [x.normal_(generator=draw) for x in tensors]
    trace = trace_function(fn, tuple(tensors)).trace
    places = [Placement(mesh, v.shape, splits) for v, splits in zip(trace.inputs, SPLITS, strict=True)]
    (out,) = trace.outputs
    pins = dict(zip(trace.inputs, places, strict=True)) | {out: Placement(mesh, out.shape, SPLITS[0])}
    return shard(trace, mesh, pins, trace.inputs[1:], {"tp": "weights"}).trace, tensors, places


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fn", [mlp, sums])
def test_values_and_bytes_are_the_same(fn: Callable, ranks: int) -> None:
    program, tensors, places = local(fn, ranks)
    parts = [in_step.cut(x, place) for x, place in zip(tensors, places, strict=True)]
    pieces, said = async_tp(program, ["tp"])
    verify(pieces)
    assert not any(is_collective(e, "all_gather", "reduce_scatter") for e in pieces.equations), said
    assert sum(map(bytes_sent, pieces.equations)) == sum(map(bytes_sent, program.equations)) > 0
    for each in (pieces, verify(overlap(pieces))):
        for a, b in zip(in_step.run(each, parts), in_step.run(program, parts), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_products_of_one_gathered_value_are_cut_together() -> None:
    """Each piece is multiplied by both weights before the next one is waited for."""
    names = [
        e.op.name if is_collective(e) else e.opname for e in overlap(async_tp(local(mlp, 2)[0], ["tp"])[0]).equations
    ]
    first = names.index("in_order")
    assert names[:first] == ["begin", "linear", "linear", "wait", "linear", "linear"]


def test_what_was_cut_is_told_and_why_other_exchanges_were_not() -> None:
    program, *_ = local(mlp)
    _, said = async_tp(program, ["tp"])
    assert [line.split(" ", 4)[::4] for line in said] == [
        ["tp:", "and 2 products of its rows are cut into 4 pieces"],
        ["tp:", "and a product before it are cut into 4 pieces"],
    ]
    assert all("test_async_tp.py:" in line for line in said)
    assert async_tp(program, ["dp"]) == (program, ())
    program, *_ = local(lambda x, *weights: torch.relu(x).cumsum(1))
    same, said = async_tp(program, ["tp"])
    assert same.equations == program.equations and "no product reads its rows" in said[0]


def test_less_is_exposed() -> None:
    h100 = machine("h100")
    program, *_ = local(mlp, 2, 512, "meta")
    whole, pieces = (timeline(overlap(t), h100) for t in (program, async_tp(program, ["tp"])[0]))
    assert pieces.waiting < whole.waiting / 2
