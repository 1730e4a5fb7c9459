"""What is handed to the library's attention gradients: layouts by their rule, and plans of our own."""

from __future__ import annotations

import math

import pytest
import torch

from tessera.executors import attention_backward as ours
from tessera.executors.aten import bind

SHAPE = (2, 3, 5, 8)  # [B, H, T, D]


def tensor(order: tuple[int, ...]) -> torch.Tensor:
    """Dense in memory in this order of dimensions."""
    return torch.randn([SHAPE[d] for d in order]).permute([order.index(d) for d in range(4)])


ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)]


@pytest.mark.parametrize("given", ORDERS)
@pytest.mark.parametrize("wanted", ORDERS)
def test_laid_out_changes_the_layout_and_nothing_else(given, wanted):
    x = tensor(given)
    out = ours.laid_out(x, wanted)
    torch.testing.assert_close(out, x, rtol=0, atol=0)
    assert out.permute(wanted).is_contiguous()
    assert (out is x) == (given == wanted)


def test_expanded_and_sliced_tensors_become_dense():
    for x in (torch.ones(()).expand(SHAPE), torch.randn(2, 3, 5, 16)[..., ::2]):
        out = ours.laid_out(x, ours.BY_TOKEN)
        assert out.permute(ours.BY_TOKEN).is_contiguous()
        torch.testing.assert_close(out, x, rtol=0, atol=0)


def test_dimensions_of_one_have_no_layout():
    x = torch.randn(1, 4, 1, 8)
    assert ours.laid_out(x, ours.BY_TOKEN) is x


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 0.9])
def test_a_plan_of_our_own_is_the_same_dropout(dropout):
    own = ours.own_plan(dropout)
    assert abs(own - dropout) < 1e-6
    assert math.copysign(1, own) < 0 if dropout == 0 else torch.tensor(own) != torch.tensor(dropout)


@pytest.mark.parametrize("order", ORDERS)
def test_cudnn_gets_its_output_as_the_query_lies_and_the_gradient_by_token(order):
    got = []
    backward = ours._cudnn_backward(lambda *args, **kwargs: got.append((args, kwargs)))
    q, other = tensor(order), tensor((1, 2, 0, 3))
    backward(other, q, q, q, other, *[None] * 8, 0.0, True, scale=0.5)
    ((args, kwargs),) = got
    assert args[0].permute(ours.BY_TOKEN).is_contiguous()
    assert args[4].stride() == q.stride()
    assert math.copysign(1, args[-2]) < 0 and args[-1] is True and kwargs == {"scale": 0.5}


def test_programs_call_the_adapted_operators():
    for name in ("cudnn", "efficient"):
        op = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward").default
        assert bind(op).__module__ == ours.__name__
