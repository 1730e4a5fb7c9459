"""reinterpret: views of views are one call where nobody writes them or sees them outside, and only there."""

from __future__ import annotations

import pytest
import torch
from programs import assert_same, trace_of
from torch import nn

import tessera
from tessera.ir.printer import operator_name
from tessera.passes.memory.reinterpret import reinterpret

X, W = torch.randn(5, 8), torch.randn(12, 8)


def after(fn, *args) -> list[str]:  # noqa: ANN001, ANN002
    before = trace_of(fn, *args)
    made = reinterpret(before)
    assert_same(before, made, *args)
    return [operator_name(eqn.op).split(".")[1] for eqn in made.equations]


def test_a_chain_is_one_view():
    found = after(lambda x, w: torch.mm(x, w.t()).view(5, 3, 4).transpose(0, 1).exp(), X, W)
    assert found[-2:] == ["reinterpret", "exp"]
    found = after(lambda x, w: torch.mm(x, w.t()).view(5, 3, 2, 2)[:, 1].transpose(1, 2)[2:4].cos(), X, W)
    assert found == ["t", "mm", "reinterpret", "cos"]


def test_parts_begin_where_they_lie():
    def heads(x, w):  # noqa: ANN001, ANN202
        q, k, v = torch.nn.functional.linear(x, w).view(5, 3, 4).unbind(1)
        return (q + k) * v.flip(0)

    assert "reinterpret" in after(heads, X, W)

    def selected(x, w):  # noqa: ANN001, ANN202
        h = torch.nn.functional.linear(x, w).view(5, 3, 4).transpose(0, 1)
        return h[0].sin() + h[1].cos() * h[-1].exp()

    assert after(selected, X, W).count("reinterpret") == 3


def test_a_view_that_is_its_base_again_is_none():
    assert after(lambda x, w: torch.mm(x, w.t()).view(5, 3, 4).view(5, 12).sin(), X, W) == ["t", "mm", "sin"]


def test_what_is_seen_outside_or_given_stays():
    """Such views count versions with what they are views of."""
    assert "reinterpret" not in after(lambda x, w: torch.mm(x, w.t()).view(3, 20).t(), X, W)
    assert "reinterpret" not in after(lambda x, w: x.view(4, 10).t().sin(), X, W)
    assert "reinterpret" not in after(lambda x, w: (torch.mm(x, w.t()) * 1j).view(3, 20).t().sin(), X, W)


def test_what_is_written_stays():
    def fn(x, w):  # noqa: ANN001, ANN202
        h = torch.mm(x, w.t())
        h.view(3, 20).t().add_(1)
        return h.sin()

    compiled = tessera.jit(fn, executors=["aten"], strict=True)
    torch.testing.assert_close(compiled(X, W), fn(X, W))


def test_sizes_that_are_open_stay():
    fn = tessera.jit(lambda x, w: torch.mm(x, w.t()).view(-1, 3, 4).transpose(0, 1).exp(), dynamic=True, strict=True)
    for rows in (5, 7, 1):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fn(x, W), torch.mm(x, W.t()).view(-1, 3, 4).transpose(0, 1).exp())


@pytest.mark.parametrize("executors", [["aten"], None])
def test_an_encoder_learns_as_in_eager(executors):  # noqa: ANN001
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    fast = tessera.jit(model, executors=executors, strict=True)
    x = torch.randn(3, 7, 16, requires_grad=True)
    given = [x, *model.parameters()]
    for a, b in zip(
        torch.autograd.grad(fast(x).square().sum(), given),
        torch.autograd.grad(model(x).square().sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_somebody_who_writes_a_result_is_told_as_in_eager():
    """A view of what backward needs shares its versions, whoever made it."""

    def fn(x, w):  # noqa: ANN001, ANN202
        h = torch.mm(x, w.t()).exp()  # saved for backward
        return h.view(3, 20).t()

    for call in (fn, tessera.jit(fn, executors=["aten"], strict=True)):
        x = X.clone().requires_grad_()
        y = call(x, W)
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
