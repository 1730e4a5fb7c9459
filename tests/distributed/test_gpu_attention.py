"""Attention's kernels on GPUs: a rank's program fits together by its types and has these exchanges, and its equations
give what the whole gives where each kernel is played by arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from tessera.distributed import in_step
from tessera.ir.builder import Builder, emit
from tessera.ir.dist import exchange_of
from tessera.ir.interp import run
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Mark, Placement
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, contiguous_strides
from tessera.ir.verify import verify
from tessera.transforms.shard.partition import Sharded, shard

SHAPE = (2, 4, 64, 64)
KERNELS = ["flash", "efficient", "cudnn"]
aten = torch.ops.aten


def attention(
    kernel: str, masked: bool = False, shape: tuple = SHAPE, dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0"
) -> Trace:
    """Forward and backward; sizes among the kernel's results are numbers to its backward."""
    builder = Builder("attention")

    def type_of(shape: tuple) -> TensorType:
        return TensorType(dtype, shape, contiguous_strides(shape), torch.device(device))

    q, k, v, ct = (builder.input(name, type_of(shape)) for name in ("q", "k", "v", "ct"))
    names = [f"_scaled_dot_product_{kernel}_attention{end}" for end in ("", "_backward")]
    ahead, behind = (partial(emit, getattr(aten, name).default) for name in names)
    batch, heads, size, _ = shape
    rows = builder.input("mask", type_of((batch, 1, size, size))) if masked else None
    causal = not masked
    with builder:
        mask = None if rows is None else emit(aten.expand.default, rows, [batch, heads, size, size])
        match kernel:
            case "flash":
                out, lse, *_, seed, offset, _ = ahead(q, k, v, 0.0, True)
                grads = behind(ct, q, k, v, out, lse, None, None, size, size, 0.0, True, seed, offset)
            case "efficient":
                out, lse, seed, offset = ahead(q, k, v, mask, True, 0.0, causal)
                wanted = [True, True, True, False]
                grads = behind(ct, q, k, v, mask, out, lse, seed, offset, 0.0, wanted, causal)
            case "cudnn":
                out, lse, *_, seed, offset, _ = ahead(q, k, v, mask, True, 0.0, causal)
                grads = behind(ct, q, k, v, out, lse, seed, offset, mask, None, None, size, size, 0.0, causal)
    return builder.finish([out, *grads[:3]])


def on_ranks(trace: Trace, ranks: int, way: str, zigzag: bool) -> tuple[Sharded, Placement]:
    mesh, dim = Mesh.of(cp=ranks), 1 if way == "heads" else 2
    homes = {v: Placement.whole(mesh, v.shape).with_axis(dim, "cp", Mark(zigzag=zigzag)) for v in trace.inputs}
    place = homes[trace.inputs[0]]
    sharded = shard(trace, mesh, {}, homes=homes, ways={"cp": "ring"} if way == "ring" else {})
    verify(sharded.trace)
    assert not sharded.notes
    assert all(v.type.placement == place for v in sharded.trace.outputs)
    return sharded, place


def exchanges(sharded: Sharded) -> list[str]:
    return [eqn.op.name for eqn in sharded.trace.equations if exchange_of(eqn) is not None]


ROUND = ["permute"] * 6  # keys and values, twice, and their gradients
RELAID = ["all_to_all"] * 4  # operands are cut of whole ones here


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("way", ["ring", "ulysses", "heads"])
def test_kernels(kernel: str, way: str) -> None:
    sharded, _ = on_ranks(attention(kernel), 2, way, zigzag=way == "ring")
    assert exchanges(sharded) == {"ring": ROUND, "ulysses": RELAID, "heads": []}[way]


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_masks_in_a_ring(kernel: str, zigzag: bool) -> None:
    """Columns are chosen before a mask is spread over heads."""
    sharded, _ = on_ranks(attention(kernel, masked=True), 2, "ring", zigzag)
    assert exchanges(sharded) == ROUND
    chosen = [eqn for eqn in sharded.trace.equations if eqn.opname == "index_select"]
    assert chosen and all(tuple(eqn.out.shape) == (2, 1, 32, 32) for eqn in chosen)


def test_a_log_sum_exp_with_more_room_than_the_sequence_goes_no_ring() -> None:
    """Which part of it belongs to whom no rule says."""
    sharded, _ = on_ranks(attention("efficient", shape=(2, 4, 48, 64)), 2, "ring", zigzag=False)
    assert exchanges(sharded) == RELAID


# --- the equations, with kernels played by arithmetic ---------------------------------------------


def scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = s if bias is None else s + bias
    return s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), float("-inf")) if causal else s


def ahead(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Where a query sees nothing a kernel may give anything."""
    s = scores(q, k, bias, causal)
    lse = s.logsumexp(-1)
    return s.softmax(-1) @ v, lse.masked_fill(lse == float("-inf"), float("nan"))


def behind(ct, q, k, v, out, lse, bias, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    p = (scores(q, k, bias, causal) - lse[..., None]).exp()
    ds = p * (ct @ v.mT - (ct * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return ds @ k, ds.mT @ q, p.mT @ ct


NONE = torch.zeros((), dtype=torch.int64)


def efficient(q, k, v, bias, lse_too, dropout=0.0, causal=False, *, scale=None):
    out, lse = ahead(q, k, v, bias, causal)
    room = torch.full((*lse.shape[:2], -lse.shape[2] % 32), float("inf"))
    return out, torch.cat([lse, room.to(lse)], 2).float(), NONE, NONE


def efficient_backward(ct, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale=None):
    assert lse.shape[2] % 32 == 0
    return *behind(ct, q, k, v, out, lse[:, :, : q.shape[2]], bias, causal), torch.empty(0)


def cudnn(q, k, v, bias, lse_too, dropout=0.0, causal=False, debug=False, *, scale=None):
    out, lse = ahead(q, k, v, bias, causal)
    return out, lse[..., None].float(), NONE, NONE, q.shape[2], k.shape[2], NONE, NONE, NONE


def cudnn_backward(
    ct, q, k, v, out, lse, seed, offset, bias, starts_q, starts_k, most_q, most_k, dropout, causal, *, scale=None
):
    return behind(ct, q, k, v, out, lse[..., 0], bias, causal)


@pytest.fixture
def played() -> Iterator[None]:
    kernels = {
        "efficient_attention": efficient, "efficient_attention_backward": efficient_backward,
        "cudnn_attention": cudnn, "cudnn_attention_backward": cudnn_backward,
    }  # fmt: skip
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in kernels.items():
            library.impl(f"_scaled_dot_product_{name}", kernel, "CPU")
        yield


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("ranks", "length"), [(2, 64), (3, 96), (4, 32)])  # of 4 ranks each has 8 queries, room for 32
@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_a_ring_gives_what_the_whole_gives(
    played: None, kernel: str, ranks: int, length: int, masked: bool, zigzag: bool
) -> None:
    shape = (2, 2, length, 8)
    trace = attention(kernel, masked, shape, torch.float32, "cpu")
    draw = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, generator=draw) for _ in range(4)]
    if masked:
        numbers = torch.randn((2, 1, length, length), generator=draw)
        ahead_only = torch.ones(length, length).tril().bool() & (numbers < 1.5)
        ahead_only |= torch.eye(length).bool()
        args.append(numbers.masked_fill(~ahead_only, float("-inf")))
    sharded, place = on_ranks(trace, ranks, "ring", zigzag)
    given = [in_step.cut(x, v.type.placement) for x, v in zip(args, sharded.trace.inputs, strict=True)]
    for part, want in zip(in_step.run(sharded.trace, given), run(trace, *args), strict=True):
        torch.testing.assert_close(in_step.join(part, place), want, rtol=2e-5, atol=2e-6)
