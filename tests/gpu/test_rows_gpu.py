"""Sequences at places of their own on a GPU: steps of generation agree with float64, also replayed as a CUDA graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tessera

pytestmark = pytest.mark.gpu
BATCH, HEADS, GROUPS, LENGTH, HEAD = 5, 8, 2, 600, 64


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("dim", [2, 1])
def test_steps_of_sequences_of_other_lengths(dim: int, cuda_graph: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    width = HEADS * HEAD
    sizes = [(n * HEAD, width) for n in (HEADS, GROUPS, GROUPS)]
    weights = [torch.randn(size, device="cuda", dtype=torch.bfloat16) / width**0.5 for size in sizes]
    shape = (BATCH, GROUPS, LENGTH, HEAD) if dim == 2 else (BATCH, LENGTH, GROUPS, HEAD)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

    def step(x: Tensor, weights: list[Tensor], keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w).view(BATCH, -1, HEAD) for w in weights)
        rows = torch.arange(BATCH, device=x.device)
        for cache, new in ((keys, k), (values, v)):
            cache[(rows, slice(None), at) if dim == 2 else (rows, at)] = new
        seen = (torch.arange(LENGTH, device=x.device) <= at[:, None])[:, None, None]
        keys, values = (c if dim == 2 else c.transpose(1, 2) for c in (keys, values))
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=seen, enable_gqa=True)

    fast = tessera.jit(step, strict=True, cuda_graph=cuda_graph)
    exact_weights, exact = [w.double() for w in weights], [c.double() for c in caches]
    at = torch.tensor([0, 7, 63, 300, LENGTH - 8], device="cuda")
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(BATCH, width, device="cuda", dtype=torch.bfloat16)
            found, wanted = fast(x, weights, *caches, at), step(x.double(), exact_weights, *exact, at)
            torch.testing.assert_close(found.double(), wanted, rtol=0.03, atol=0.03)
            at += 1
    for one, two in zip(caches, exact, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=0.03, atol=0.03)
    (graph,) = fast.__tessera__.compilations()
    operators = [str(eqn.op) for eqn in graph.account.programs[-1].trace.equations]
    assert operators.count("rows.rows_linear") == 1 and operators.count("rows.cached_attention") == 1
    assert not cuda_graph or "captured" in tessera.explain(fast).graphs[0].cuda_graph
