"""Copies whose layout nobody needs are not made; values, gradients and the layouts of results stay eager's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import tessera
from tessera.passes.decompose import unturn as unturning
from tessera.passes.fuse.compiler import innermost

ROWS, WIDTH = 24, 8


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of any size and on any device count as large."""
    monkeypatch.setattr(unturning, "turns", lambda eqn: innermost(eqn.inputs()[0].tensor) != innermost(eqn.out.tensor))


def draw() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(ROWS, WIDTH, generator=generator).double().requires_grad_() for _ in range(2))
    return a, b, torch.tensor(0.5, dtype=torch.float64, requires_grad=True)


def contrastive(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Each row picks its column, and each column its row."""
    logits = (a @ b.t()) * scale.exp()
    right = torch.arange(ROWS)
    return F.cross_entropy(logits, right) + F.cross_entropy(logits.t(), right)


def weighed(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    logits = (a @ b.t()) * scale
    return (logits.t().log_softmax(-1).t() * logits).sum() + logits.t().softmax(-1).t().mul(scale).pow(2).sum()


def returned(a: Tensor, b: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    logits = (a @ b.t()) * scale
    y = logits.t().log_softmax(-1)
    return y, y * 2, (y * logits).sum()


def flattened(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return ((a @ b.t()) * scale).t().softmax(-1).mul(2).view(-1).sin().sum()


def compared(fn, *, spared: bool) -> list[str]:
    fast, given, expected = tessera.jit(fn, strict=True), draw(), draw()
    ours, eager = fast(*given), fn(*expected)
    for x, y in zip(*((z if isinstance(z, tuple) else (z,)) for z in (ours, eager)), strict=True):
        assert_close(x, y)
        assert x.stride() == y.stride()
    for out in (ours, eager):
        sum(x.sin().sum() for x in (out if isinstance(out, tuple) else (out,))).backward()
    for x, y in zip(given, expected, strict=True):
        assert_close(x.grad, y.grad)
    changed = [stage.name for stage in tessera.stages(fast) if stage.name.endswith("unturn")]
    assert bool(changed) == spared
    return changed


@pytest.mark.parametrize("fn", [contrastive, weighed])
def test_copies_that_only_arithmetic_reads_go(fn):
    compared(fn, spared=True)


@pytest.mark.parametrize("fn", [returned, flattened])
def test_copies_whose_layout_is_seen_stay(fn):
    compared(fn, spared=False)


def test_the_gradient_of_both_directions_lies_as_the_logits():
    """A kernel that makes it may sum it too, for the scale; nothing sums rows of which one class alone is not zero."""
    fast = tessera.jit(contrastive, strict=True)
    fast(*draw()).backward()
    trace = next(s.trace for s in tessera.stages(fast) if s.name == "joint unturn")
    makers = trace.makers()
    read = [e.args[0] for e in trace.equations if e.opname == "mm" and tuple(e.args[0].shape) == (ROWS, ROWS)]
    assert any(makers[v].opname != "t" for v in read)
    assert all(v.tensor.is_row_major == (makers[v].opname != "t") for v in read)
    sums = [e.args[0] for e in trace.equations if e.opname == "sum" and e.args[0].ndim == 2]
    assert sums and not [v for v in sums if makers[v].opname == "where"]
