"""Attention as tile kernels: interpreted, written for Triton, compiled for GPUs, and claimed where it should win."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_cases import CASES, LONGER, Case, check
from on_h200 import CUDA_TILE as TARGET
from on_h200 import H200, TRITON
from test_products import cuda_trace
from xdsl.dialects.builtin import StringAttr

from tessera.executors.attention import attends, parts_for
from tessera.executors.claim import claim
from tessera.tile.attention import Attention, attention, attention_parts
from tessera.tile.dialect import interp
from tessera.tile.dialect.build import KernelBuilder, f16, f32
from tessera.tile.dialect.index import name
from tessera.tile.dialect.ops import KernelOp, StoreOp
from tessera.tile.dialect.types import index_attr
from tessera.tile.schedules.schedule import Schedule, inner_axis, reduced_axis
from tessera.tile.targets import named
from tessera.tile.targets.cuda_tile import toolchain
from tessera.tile.targets.cuda_tile.write import write as write_cutile

SMALL = Schedule((("i", 16), ("c", 16), ("r", 16)), loop=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: Case) -> None:
    check(case, interp.run)


def test_axes() -> None:
    kernel = attention(Attention(64, 64))
    assert inner_axis(kernel) == "d" and reduced_axis(kernel) == "r"


def test_targets_without_it_say_so() -> None:
    target = named("cpu")
    assert target is not None
    with pytest.raises(NotImplementedError, match="inside a loop"):
        target.compile(attention(Attention(16, 16)), SMALL)


# --- Triton ---


def test_compiles_for_hopper() -> None:
    pytest.importorskip("triton")
    from on_h200 import propose

    from tessera.tile.targets.triton.resources import compile_only

    of = Attention(128, 128, group=4, queries=1, packed=True, scale=0.1)
    sizes = dict.fromkeys(of.symbols, 4096)
    parts = compile_only(attention_parts(of, 8), propose(attention_parts(of, 8), sizes)[0], 90)
    assert parts.spills == 0 and "mma" in parts.ptx and "cp.async" in parts.ptx
    wide = Attention(128, 128, group=4, queries=1, packed=True, scale=0.1, element=f32)
    exact = compile_only(attention_parts(wide, 8), propose(attention_parts(wide, 8), sizes)[0], 90)
    assert exact.spills == 0 and "mma" not in exact.ptx  # full precision: no matrix unit has it
    many = attention(Attention(128, 128, causal=True, scale=0.1))
    whole = compile_only(many, propose(many, sizes)[0], 90)
    assert whole.spills == 0 and "wgmma" in whole.ptx and whole.shared <= 227 * 1024


def test_causal_queries_stop_at_their_block() -> None:
    pytest.importorskip("triton")
    from tessera.tile.targets.triton.tiles import write

    schedule = Schedule((("i", 64), ("c", 64), ("r", 64)), loop=True)
    causal, every = (write(attention(Attention(64, 64, causal=c)), schedule) for c in (True, False))
    assert "range(0, tl.minimum(keys, at_i + 64), 64)" in causal
    assert "range(0, keys, 64)" in every


def test_what_is_not_attention_is_refused() -> None:
    pytest.importorskip("triton")
    from tessera.tile.targets.triton.tiles import write

    k = KernelBuilder("odd")
    i, r, d = k.axis("i", 32), k.axis("r", 32, reduce=True), k.axis("d", 32, reduce=True)
    x, y = k.buffer(f32), k.buffer(f32)
    score = k.contract(k.load(x, i * 32 + d), k.load(x, r * 32 + d), "d")
    k.store(k.reduce("sum", score, "r"), y, i)
    with pytest.raises(NotImplementedError, match="two products"):
        write(k.finish(), Schedule((("i", 16), ("r", 16)), loop=True))


def test_scores_are_not_stored() -> None:
    pytest.importorskip("triton")
    from tessera.tile.rewrites.flash import flash_of

    kernel = attention(Attention(16, 16, element=f32))
    flash = flash_of(kernel)
    extra = kernel.block.insert_arg(kernel.buffers[0].type, 0)
    at = index_attr(name("i") * 64 + name("r"))
    kernel.block.insert_op_after(
        StoreOp(operands=[flash.below.result, extra, [], None], properties={"at": at, "mode": StringAttr("set")}),
        flash.below,
    )
    with pytest.raises(NotImplementedError, match="stored for every key"):
        flash_of(kernel)


# --- CUDA Tile ---


def cutile_schedule(kernel: KernelOp) -> Schedule:
    """Small blocks, so that there are several of everything."""
    if inner_axis(kernel) is None:
        return Schedule((("c", 16), ("p", 8)))
    columns = kernel.axis("c").size.expr.constant or 1
    return Schedule((("i", 16), ("c", max(1 << (columns - 1).bit_length(), 16)), ("r", 16)), loop=True)


@pytest.mark.parametrize("case", [*CASES, *LONGER], ids=str)
def test_cuda_tile_gives_the_right_numbers(case: Case) -> None:
    import cutile_model

    def run(kernel: KernelOp, tensors: list[torch.Tensor], symbols: list[int]) -> None:
        cutile_model.run(kernel, cutile_schedule(kernel), tensors, symbols)

    check(case, run)
    check(case, run, torch.bfloat16, 2e-2)


def test_cuda_tile_reads_keys_once_for_all_heads_of_a_group() -> None:
    text = write_cutile(attention(Attention(64, 64, group=4, causal=True)), SMALL)
    assert "(b_tile, h_tile, r_tile, 0), (1, 1, 16, 64)" in text  # keys: no group among their axes
    assert "range(ct.minimum(ct.cdiv(keys, 16), ct.cdiv(i_tile * 16 + 16, 16)))" in text


@pytest.mark.skipif(not toolchain.available(), reason="needs cuda-tile[tileiras]")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_cuda_tile_compiles_without_spilling(arch: str) -> None:
    whole = Attention(128, 128, causal=True, scale=0.1)
    few = Attention(64, 64, group=4, queries=3, packed=True, scale=0.1, mask="where", element=f16)
    for kernel in (attention(whole), attention_parts(few, 8)):
        schedule = TARGET.propose(kernel, dict.fromkeys([s.data for s in kernel.symbol_names], 4096))[0]
        assert not TARGET.compile(kernel, schedule).resources(arch).spills


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("case", [*CASES, *LONGER], ids=str)
def test_cuda_tile_on_the_gpu(case: Case) -> None:
    """Without the compiler, what `build_cubins` made."""

    def run(kernel: KernelOp, tensors: list[torch.Tensor], symbols: list[int]) -> None:
        try:
            TARGET.compile(kernel, cutile_schedule(kernel))(tensors, symbols)
        except toolchain.ToolchainError as error:
            if toolchain.available():
                raise
            pytest.skip(str(error))

    check(case, run, torch.bfloat16, 2e-2, "cuda")


# --- who runs it ---


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize(
    ("queries", "heads", "keys", "ours"),
    [(1, 32, 4096, True), (4, 32, 4096, True), (1, 8, 4096, False), (64, 32, 4096, False), (1, 32, 64, False)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_claims_few_queries_of_shared_heads(
    queries: int, heads: int, keys: int, ours: bool, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    trace = cuda_trace(decode, (2, heads, queries, 128), (2, 8, keys, 128), (2, 8, keys, 128), dtype=dtype)
    _, report = claim(trace, ["attention", "sdpa", "aten"])
    assert report[0].executor == ("attention" if ours else "sdpa")


def test_parts_fill_the_gpu() -> None:
    assert [parts_for(*sizes, H200) for sizes in ((8, 32768), (64, 8192), (1024, 8192), (1, 100))] == [32, 4, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [300, 4096, 4097])
@pytest.mark.parametrize("mask", ["", "add", "where"])
@pytest.mark.parametrize(("dtype", "off"), [(torch.bfloat16, 1e-2), (torch.float32, 2e-6)], ids=str)
def test_on_the_gpu(keys: int, mask: str, dtype: torch.dtype, off: float) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 3, 32, 128, dtype=dtype, device="cuda").transpose(1, 2)
    k, v = (torch.randn(2, 8, keys, 128, dtype=dtype, device="cuda") for _ in range(2))
    given = {
        "": None,
        "add": torch.randn(1, 1, 3, keys, dtype=dtype, device="cuda"),
        "where": torch.rand(2, 1, 3, keys, device="cuda") > 0.3,
    }[mask]
    got = attends((0, 2, 1, 3), TRITON)(q, k, v, given, enable_gqa=True)
    wide = given.double() if given is not None and given.is_floating_point() else given
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), wide, enable_gqa=True)
    assert (got.double() - want).abs().max() <= off
