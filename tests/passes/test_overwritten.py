"""Results that are overwritten: eager's graph keeps what was there, with a gradient of zeros.

So the result requires grad, and inputs that only had a part in what was overwritten get zeros, not None.
"""

from __future__ import annotations

import pytest
import torch
from against_eager import WAYS, Programs, assert_like_eager

import tessera

PROGRAMS = program = Programs()


def inputs() -> list:
    torch.manual_seed(0)
    return [torch.rand(3, 4, requires_grad=True), torch.rand(3, 4, requires_grad=True), torch.rand(3, 4)]


@program
def copy_(x, w, b):
    y = x * w
    y.copy_(x.exp())
    return y.sum()


@program
def copy_const(x, w, b):
    y = x * 2
    y.copy_(b.exp())
    return y.sum(), w * 2


@program
def zero_(x, w, b):
    y = x * w
    y.zero_()
    return y


@program
def fill_(x, w, b):
    y = x * w
    y.fill_(3.0)
    return y


@program
def fill_t(x, w, b):
    y = x * 2
    y.fill_(w.sum())
    return y


@program
def slice_all(x, w, b):
    y = x * w
    y[:] = b
    return y


@program
def slice_all2(x, w, b):
    y = x * w
    y[:, :] = w
    return y * 2


@program
def ellipsis(x, w, b):
    y = x * w
    y[...] = 1.0
    return y


@program
def mul0(x, w, b):
    y = x * w
    y.mul_(0)
    return y


@program
def times0t(x, w, b):
    return x * torch.zeros(3, 4), w


@program
def where_const(x, w, b):
    return torch.where(torch.ones(3, 4, dtype=torch.bool), b, x), w


@program
def masked_all_(x, w, b):
    y = x * w
    y.masked_fill_(torch.ones(3, 4, dtype=torch.bool), 2.0)
    return y


@program
def index_copy_(x, w, b):
    y = x * w
    y.index_copy_(0, torch.arange(3), b)
    return y


@program
def index_copy_w(x, w, b):
    y = x * 2
    y.index_copy_(0, torch.arange(3), w.exp())
    return y


@program
def index_put_(x, w, b):
    y = x * w
    y[torch.arange(3)] = b
    return y


@program
def view_copy(x, w, b):
    y = x * w
    y.view(-1).copy_(b.view(-1))
    return y


@program
def view_copy2(x, w, b):
    y = x * w
    y.t().copy_(b.t())
    return y.sin()


@program
def rows(x, w, b):
    y = x * w
    for i in range(3):
        y[i] = b[i]
    return y


@program
def rows_w(x, w, b):
    y = torch.zeros(3, 4)
    for i in range(3):
        y[i] = x[i] * w[i]
    for i in range(3):
        y[i] = b[i]
    return y


@program
def normal_(x, w, b):
    y = x * w
    y.normal_()
    return y * 0 + 1


@program
def steps(x, w, b):
    return x.floor(), w.sign(), x.round(), x.ceil(), w.trunc()


@program
def floor_(x, w, b):
    y = x * w
    y.floor_()
    return y


@program
def pow0(x, w, b):
    return x**0, w.pow(0.0)


@program
def expand_copy(x, w, b):
    y = x * w
    y.copy_(b[:1])
    return y


@program
def copy_int(x, w, b):
    y = x * w
    y.copy_((b * 5).int())
    return y


@program
def scatter_all(x, w, b):
    y = x * w
    y.scatter_(1, torch.arange(4).expand(3, 4), b)
    return y


@program
def zeros_like_(x, w, b):
    return torch.zeros_like(x), w * 1


@program
def add_zeros_mul(x, w, b):
    y = torch.zeros_like(x)
    y.add_(x)
    y.copy_(b)
    return y, w * 1


@program
def swap(x, w, b):
    y = x * w
    z = y.clone()
    y.copy_(z)
    return y


@program
def dropout1(x, w, b):
    return torch.nn.functional.dropout(x, 1.0), w


@program
def copy_then_mul(x, w, b):
    y = x * 2
    y.copy_(b)
    y.mul_(w)
    return y


@program
def inp_copy(x, w, b):
    b.copy_(x * 2)
    return b * w


@program
def inp_overwritten(x, w, b):
    b.mul_(x)
    b.copy_(torch.ones(3, 4))
    return b * 1, w


@program
def inp_zero(x, w, b):
    b.mul_(x)
    b.zero_()
    return b * 1


@program
def nan_through(x, w, b):
    y = 1 / (x - x.detach())
    y.copy_(b)
    return y


@program
def triu_(x, w, b):
    y = x * w
    y.triu_(10)
    return y


@program
def eq_(x, w, b):
    y = x * w
    y.eq_(w)
    return y, x * 1


@program
def cum(x, w, b):
    y = x * w
    y.cumsum_(0)
    y.zero_()
    return y


@program
def resize_same(x, w, b):
    y = x * w
    y[:, 0].zero_()
    y[:, 1:].fill_(1.0)
    return y


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_like_eager(name: str, way: str) -> None:
    assert_like_eager(PROGRAMS[name], inputs, **WAYS[way])


def test_rows_that_are_written_cost_nothing_more() -> None:
    """What a write through a view replaces is known to be replaced by the write itself: no zeros are added up."""

    def stacked(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(3, 4)
        for i in range(3):
            y[i] = x[i] * 2
        return y

    fast = tessera.jit(stacked, executors=["aten"])
    fast(torch.rand(3, 4, requires_grad=True))
    assert not any(
        getattr(eqn.op, "_opname", "") == "copy" for eqn in tessera.stages(fast)["canonicalise"].trace.equations
    )
