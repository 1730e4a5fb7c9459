"""Attention as tile kernels: interpreted, written for Triton, compiled for GPUs, and claimed where it should win."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from test_products import cuda_trace

from tessera.executors.attention import attends, parts_for
from tessera.executors.claim import claim
from tessera.tile import interp
from tessera.tile.attention import Attention, attention, attention_parts, attention_whole
from tessera.tile.build import KernelBuilder, bf16, f32
from tessera.tile.schedule import Schedule, inner_axis, reduced_axis
from tessera.tile.targets import named


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int  # of keys
    group: int
    queries: int
    keys: int
    width: int
    values: int
    causal: bool = False
    mask: str = ""
    packed: bool = True
    parts: int = 1


CASES = [
    Case(2, 2, 3, 5, 11, 8, 8, packed=False),
    Case(2, 2, 3, 5, 11, 8, 4, causal=True),
    Case(2, 2, 1, 19, 19, 8, 8, causal=True, packed=False),
    Case(1, 2, 4, 1, 33, 8, 8, mask="add", parts=4),
    Case(2, 2, 2, 1, 33, 16, 16, parts=8),
    Case(1, 2, 2, 3, 5, 16, 16, causal=True, parts=8),
    Case(2, 1, 4, 2, 30, 8, 8, mask="where", parts=2),
]
Run = Callable[..., None]


def check(case: Case, run: Run, dtype: torch.dtype = torch.float32, tol: float = 1e-5) -> None:
    """A case run by something that takes a kernel, tensors and symbols, against PyTorch in f64."""
    torch.manual_seed(0)
    heads = case.heads * case.group
    q = torch.randn(case.batch, case.queries, heads, case.width).to(dtype).transpose(1, 2)
    k = torch.randn(case.batch, case.heads, case.keys, case.width).to(dtype)
    v = torch.randn(case.batch, case.heads, case.keys, case.values).to(dtype)
    out = torch.zeros(case.batch, heads, case.queries, case.values).to(dtype)
    given, mask = [q, k, v], mask_of(case, dtype)
    symbols = [case.batch, case.heads, case.queries, case.keys, *(s for x in (q, k, v, out) for s in x.stride()[:3])]
    if mask is not None:
        given.append(mask)
        symbols += mask.stride()
    queries, element = case.queries if case.packed else None, f32 if dtype is torch.float32 else bf16
    of = Attention(
        case.width, case.values, case.group, queries, case.packed, case.causal, case.width**-0.5, case.mask, element
    )
    if case.parts == 1:
        run(attention(of), [*given, out], symbols)
    else:
        rows = case.parts * case.batch * heads * case.queries
        left = [torch.zeros(rows * n) for n in (case.values, 1, 1)]
        run(attention_parts(of, case.parts), [*given, *left], symbols)
        run(attention_whole(of, case.parts), [*left, out], symbols)
    wide = None if mask is None else mask if mask.dtype is torch.bool else mask.double()
    want = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), wide, is_causal=case.causal, enable_gqa=True
    )
    assert (out.double() - want).abs().max() < tol


def mask_of(case: Case, dtype: torch.dtype) -> torch.Tensor | None:
    shape = (case.batch, case.heads * case.group, case.queries, case.keys)
    if case.mask == "add":
        return torch.randn(1, 1, *shape[2:]).to(dtype).expand(shape)
    if case.mask == "where":
        holds = torch.rand(case.batch, 1, *shape[2:]) > 0.5
        holds[0, 0, 0] = False  # a query that sees nothing
        return holds.expand(shape)
    return None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: Case) -> None:
    check(case, interp.run)


def test_axes() -> None:
    kernel = attention(Attention(64, 64))
    assert inner_axis(kernel) == "d" and reduced_axis(kernel) == "r"


def test_targets_without_it_say_so() -> None:
    for name in ("cpu", "cuda_tile"):
        target = named(name)
        if target is not None:
            with pytest.raises(NotImplementedError, match="inside a loop"):
                target.compile(attention(Attention(16, 16)), Schedule((("i", 16), ("c", 16), ("r", 16)), loop=True))


# --- Triton ---


def test_compiles_for_hopper() -> None:
    pytest.importorskip("triton")
    from tessera.tile.targets.triton.propose import propose
    from tessera.tile.targets.triton.resources import compile_only

    of = Attention(128, 128, group=4, queries=1, packed=True, scale=0.1)
    sizes = dict.fromkeys(of.symbols, 4096)
    parts = compile_only(attention_parts(of, 8), propose(attention_parts(of, 8), sizes)[0], 90)
    assert parts.spills == 0 and "mma" in parts.ptx and "cp.async" in parts.ptx
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


# --- who runs it ---


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize(
    ("queries", "heads", "keys", "ours"),
    [(1, 32, 4096, True), (4, 32, 4096, True), (1, 8, 4096, False), (64, 32, 4096, False), (1, 32, 64, False)],
)
def test_claims_few_queries_of_shared_heads(queries: int, heads: int, keys: int, ours: bool) -> None:
    pytest.importorskip("triton")
    trace = cuda_trace(decode, (2, heads, queries, 128), (2, 8, keys, 128), (2, 8, keys, 128))
    _, report = claim(trace, ["attention", "sdpa", "aten"])
    assert report[0].executor == ("attention" if ours else "sdpa")


def test_parts_fill_the_gpu() -> None:
    assert parts_for(8, 32768) == 32 and parts_for(64, 8192) == 4 and parts_for(1024, 8192) == 1
    assert parts_for(1, 100) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [300, 4096, 4097])
@pytest.mark.parametrize("mask", ["", "add", "where"])
def test_on_the_gpu(keys: int, mask: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 3, 32, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    k, v = (torch.randn(2, 8, keys, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    given = {
        "": None,
        "add": torch.randn(1, 1, 3, keys, dtype=torch.bfloat16, device="cuda"),
        "where": torch.rand(2, 1, 3, keys, device="cuda") > 0.3,
    }[mask]
    got = attends((0, 2, 1, 3))(q, k, v, given, enable_gqa=True)
    wide = given.double() if given is not None and given.is_floating_point() else given
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), wide, enable_gqa=True)
    assert (got.double() - want).abs().max() <= 1e-2
