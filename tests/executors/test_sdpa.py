"""Attention stays whole and eager's kernel runs it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from programs import assert_same, trace_of

from tessera.executors.claim import claim
from tessera.executors.sdpa import backend


def attention(q, k, v):
    return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True)


def test_claimed_and_told():
    args = [torch.randn(1, 2, 8, 16) for _ in range(3)]
    trace = trace_of(attention, *args)
    after, report = claim(trace, ["sdpa", "aten"])
    assert [c.executor for c in report] == ["sdpa", "aten"]
    assert report[0].why == "flash attention"  # PyTorch has one for the CPU
    assert_same(trace, after, *args)


def test_backend_falls_back_to_plain():
    q = torch.randn(1, 2, 8, 16, dtype=torch.float64)
    trace = trace_of(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), q)
    eqn = next(e for e in trace.equations if e.op._opname == "scaled_dot_product_attention")
    assert backend(eqn).startswith("plain attention")


def test_symbolic_sizes():
    trace = trace_of(attention, *[torch.randn(3, 2, 8, 16) for _ in range(3)], dynamic=(0, 1, 2))
    after, report = claim(trace, ["sdpa", "aten"])
    assert report[0].executor == "sdpa" and report[0].why
    assert_same(trace, after, *[torch.randn(3, 2, 8, 16) for _ in range(3)])
