"""Attention to try: cases, and what PyTorch gives for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tessera.tile.attention import Attention, attention, attention_parts, attention_whole
from tessera.tile.dialect.build import bf16, f16, f32
from tessera.tile.dialect.ops import KernelOp


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
LONGER = [  # several blocks of queries and of keys, none of them full
    Case(1, 2, 2, 70, 70, 24, 40, causal=True, packed=False),
    Case(2, 1, 2, 37, 53, 16, 16, mask="where", packed=False),
    Case(1, 2, 1, 20, 150, 8, 32, mask="add", packed=False),
]
ELEMENTS = {torch.float32: f32, torch.bfloat16: bf16, torch.float16: f16}
Run = Callable[..., None]


@dataclass(frozen=True)
class Calls:
    """Kernels one after another with their tensors and symbols, the tensor they leave, and what it must hold."""

    calls: list[tuple[KernelOp, list[torch.Tensor], list[int]]]
    out: torch.Tensor
    want: torch.Tensor


def calls(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Calls:
    """A case against PyTorch in f64."""
    torch.manual_seed(0)
    heads = case.heads * case.group
    q = torch.randn(case.batch, case.queries, heads, case.width).to(device, dtype).transpose(1, 2)
    k = torch.randn(case.batch, case.heads, case.keys, case.width).to(device, dtype)
    v = torch.randn(case.batch, case.heads, case.keys, case.values).to(device, dtype)
    out = torch.zeros(case.batch, heads, case.queries, case.values).to(device, dtype)
    given, mask = [q, k, v], mask_of(case, dtype)
    symbols = [case.batch, case.heads, case.queries, case.keys, *(s for x in (q, k, v, out) for s in x.stride()[:3])]
    if mask is not None:
        mask = mask.to(device)
        given.append(mask)
        symbols += mask.stride()
    queries, element = case.queries if case.packed else None, ELEMENTS[dtype]
    of = Attention(
        case.width, case.values, case.group, queries, case.packed, case.causal, case.width**-0.5, case.mask, element
    )
    if case.parts == 1:
        made = [(attention(of), [*given, out], symbols)]
    else:
        rows = case.parts * case.batch * heads * case.queries
        left = [torch.zeros(rows * n, device=device) for n in (case.values, 1, 1)]
        made = [(attention_parts(of, case.parts), [*given, *left], symbols)]
        made.append((attention_whole(of, case.parts), [*left, out], symbols))
    wide = None if mask is None else mask if mask.dtype is torch.bool else mask.double()
    want = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), wide, is_causal=case.causal, enable_gqa=True
    )
    return Calls(made, out, want)


def check(case: Case, run: Run, dtype: torch.dtype = torch.float32, tol: float = 1e-5, device: str = "cpu") -> None:
    """A case run by something that takes a kernel, tensors and symbols."""
    found = calls(case, dtype, device)
    for kernel, tensors, symbols in found.calls:
        run(kernel, tensors, symbols)
    assert (found.out.double() - found.want).abs().max() < tol


def mask_of(case: Case, dtype: torch.dtype) -> torch.Tensor | None:
    shape = (case.batch, case.heads * case.group, case.queries, case.keys)
    if case.mask == "add":
        return torch.randn(1, 1, *shape[2:]).to(dtype).expand(shape)
    if case.mask == "where":
        holds = torch.rand(case.batch, 1, *shape[2:]) > 0.5
        holds[0, 0, 0] = False  # a query that sees nothing
        return holds.expand(shape)
    return None
