"""Grad modes as they are recorded: which history a tensor has after views, writes, `no_grad` and `detach`.

In eager a view belongs to the mode it was made in, a write under `no_grad` leaves every history as it was, and `detach`
begins a history of its own. Every program here is compiled in each way and compared with eager.
"""

from __future__ import annotations

import pytest
import torch
from against_eager import WAYS, Programs, assert_like_eager
from torch import enable_grad, no_grad

import tessera

PROGRAMS = program = Programs()


def inputs() -> list:
    torch.manual_seed(0)
    return [torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)]


@program
def write_view(x, w, b):
    y = x * 2
    with no_grad():
        y[0].mul_(5)
    return y


@program
def read_view(x, w, b):
    y = x * 2
    v = y[0]
    y.mul_(3)
    with no_grad():
        n = v.sum()
    return v * n


@program
def clamp_row(x, w, b):
    y = x * w
    with no_grad():
        y[0].clamp_(0, 1)
    return y * y


@program
def setitem(x, w, b):
    y = x * w
    with no_grad():
        y[1] = b[1]
    return y.sin()


@program
def detach_set(x, w, b):
    y = x * w
    y.detach()[1] = 7.0
    return y.sin()


@program
def detach_view_kept(x, w, b):
    y = x * w
    d = y.detach()
    d[1] = 7.0
    y.mul_(2)
    return y.sin() * d, d


@program
def detach_grad_write(x, w, b):
    y = x * w
    d = y.detach()
    d.mul_(x)
    return y * 2, d * 3


@program
def detach_grad_write_then_base(x, w, b):
    y = x * w
    d = y.detach()
    d.mul_(x)
    y.mul_(3)
    return y * 2, d * 3


@program
def detach_view_grad_write_then_base(x, w, b):
    y = x * w
    d = y.detach()
    e = d[1]
    e.mul_(x[0])
    y.mul_(3)
    return y * 2, d * 3, e * 2


@program
def mask_assign(x, w, b):
    h = x * w
    with no_grad():
        h[h < 0] = 0
    return h * x


@program
def masked_fill_vv(x, w, b):
    h = x * w
    with no_grad():
        h.t()[1:].masked_fill_(b.t()[1:] > 0, 3.0)
    return h * x


@program
def index_put_v(x, w, b):
    h = x * w
    with no_grad():
        h[:, 1:].index_put_((torch.tensor([0, 1]), torch.tensor([0, 2])), torch.tensor([5.0, 6.0]))
    return h * x


@program
def copy_v(x, w, b):
    h = x * w
    with no_grad():
        h.view(-1)[2:5].copy_(w.view(-1)[2:5])
    return h * x


@program
def view_inside_used_outside(x, w, b):
    h = x * w
    with no_grad():
        v = h[0]
    return h + v, v


@program
def view_inside_written_inside(x, w, b):
    h = x * w
    with no_grad():
        v = h[0]
        v.mul_(3)
        s = v * 2
    return h * s


@program
def view_inside_base_written_nograd(x, w, b):
    h = x * w
    with no_grad():
        v = h[0]
        h.mul_(2)
        s = v.sum()
    return h * s


@program
def view_before_written_inside_used_after(x, w, b):
    h = x * w
    v = h[0]
    with no_grad():
        v.mul_(3)
    return h.sin(), v.cos()


@program
def view_before_base_written_inside(x, w, b):
    h = x * w
    v = h[0]
    with no_grad():
        h.mul_(3)
    return h.sin(), v.cos()


@program
def view_before_read_inside_after_write(x, w, b):
    h = x * w
    v = h[0]
    u = h[:, 1]
    h.mul_(w)
    with no_grad():
        n = (v * 2).sum() + u.sum()
    return v * n, u


@program
def two_views(x, w, b):
    h = x * w
    v = h[0]
    u = h[:, 1]
    with no_grad():
        v.fill_(2.0)
    u.mul_(x[:, 0])
    return h, v, u


@program
def views_of_views(x, w, b):
    h = x * w
    v = h.t()
    u = v[1:3]
    z = u[0]
    with no_grad():
        u.mul_(2)
    z.add_(w[:, 0])
    return h, v, u, z


@program
def nested_enable(x, w, b):
    h = x * w
    with no_grad():
        a = h * 2
        with enable_grad():
            c = h * a
            h[0].mul_(w[0])
        h[1].mul_(9)
    return c, h, a


@program
def ema(x, w, b):
    b2 = b * 1
    with no_grad():
        b2.mul_(0.9).add_(x.detach(), alpha=0.1)
        b2[0].lerp_(x[0], 0.5)
    return (x - b2).square().sum()


@program
def ema_input(x, w, b):
    with no_grad():
        b.mul_(0.9).add_(x, alpha=0.1)
    return (x - b).square().sum()


@program
def ema_input_view(x, w, b):
    with no_grad():
        b[1].mul_(0.9).add_(x[1], alpha=0.1)
    return (x - b).square().sum()


@program
def ste2(x, w, b):
    q = x * w
    with no_grad():
        q.copy_(q.round())
    return q * w


@program
def ste4(x, w, b):
    q = x * w
    q.data[0].round_()
    return q * w, q[0]


@program
def vq(x, w, b):
    with no_grad():
        d = torch.cdist(x, w)
        idx = d.argmin(-1)
    q = w[idx]
    return x + (q - x).detach(), (q - x.detach()).square().mean()


@program
def out_view_nograd_of_input(x, w, b):
    with no_grad():
        v = x[0]
    return v


@program
def out_view_nograd_only(x, w, b):
    h = x * w
    with no_grad():
        v = h[0]
    return v, v * 2


@program
def out_view_detach(x, w, b):
    h = x * w
    return h, h.detach(), h.detach()[0], x.detach(), x.data


@program
def two_out_views(x, w, b):
    h = x * w
    with no_grad():
        a = h[0]
    return a, h[1]


@program
def unbind_nograd(x, w, b):
    h = x * w
    with no_grad():
        for r in h.unbind(0):
            r.clamp_(-0.5, 0.5)
    return h * 2


@program
def chunk_nograd(x, w, b):
    h = x * w
    with no_grad():
        a, c = h.chunk(2, 1)
        a.copy_(c)
    return h * 2


@program
def diag_nograd(x, w, b):
    h = x @ w.t()
    with no_grad():
        h.diagonal().fill_(0)
    return h * 2


@program
def filldiag_nograd(x, w, b):
    h = x @ w.t()
    with no_grad():
        h.fill_diagonal_(0)
    return h * 2


@program
def real_nograd(x, w, b):
    h = torch.complex(x, w)
    with no_grad():
        h.real.mul_(2)
    return h.abs()


@program
def b_requires_after(x, w, b):
    y = b * 1
    y[0] = x[0]
    with no_grad():
        y[1] = w[1]
    return y


@program
def write_with_grad_value_nograd(x, w, b):
    y = b * 1
    with no_grad():
        y[0] = x[0]
    return y + w


@program
def decorated(x, w, b):
    @no_grad()
    def f(t):
        t[0].zero_()
        return t.sum()

    h = x * w
    n = f(h)
    return h * n


@program
def set_grad(x, w, b):
    h = x * w
    with torch.set_grad_enabled(False):
        h[0].zero_()
        k = h + 1
    with torch.set_grad_enabled(True):
        z = h * k
    return z, k


@program
def t_inplace(x, w, b):
    h = x * w
    v = h[0]
    h.t_()
    h.mul_(3)
    return v * 1, h * 1


@program
def t_inplace_outs(x, w, b):
    h = x * w
    v = h[0]
    h.t_()
    return v, h


@program
def detach_inplace(x, w, b):
    h = x * w
    g = h * 2
    h.detach_()
    h.mul_(w)
    return g, h


@program
def setdiag_data(x, w, b):
    h = x @ w.t()
    h.data.fill_diagonal_(1.0)
    return h * 2, h.diagonal()


@program
def view_after(x, w, b):
    h = x * w
    with no_grad():
        h.mul_(2)
    v = h[1]
    v.mul_(x[0])
    with no_grad():
        v.add_(1)
        h[2].sub_(1)
    return h, v


@program
def split_write(x, w, b):
    h = x * w
    with no_grad():
        h[:, :2] += 1
        h[..., -1] -= w[..., -1]
        h[[0, 2]] *= 2
    return h * x


@program
def detached_input_times_weight(x, w, b):
    b.detach().mul_(w)
    return b * x


@program
def detached_input_with_history(x, w, b):
    y = x * 2
    x.detach()[1:].mul_(w[1:])
    return y


@program
def read_after_a_detached_write(x, w, b):
    b[1:].detach().mul_(w[1:])
    with no_grad():
        b[0].mul_(w[0])
    return b * 2, b[1:], x * b


@program
def input_copied_under_no_grad(x, w, b):
    b[:, 0] = 0.5
    with no_grad():
        x.copy_(b)
    return x * w


@program
def input_written_twice_under_no_grad(x, w, b):
    with no_grad():
        x.mul_(w)
        x[0].zero_()
    return x * w


@program
def input_written_in_both_modes(x, w, b):
    x.mul_(w)
    with no_grad():
        x[0].zero_()
    return x * w


# They write through .data what a derivative reads: under Dynamo such a graph runs eagerly
# (frontends/dynamo/data_writes.py).
EAGERLY = {("ste4", "dynamo"), ("setdiag_data", "dynamo")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_like_eager(name: str, way: str) -> None:
    assert_like_eager(PROGRAMS[name], inputs, **WAYS[way], strict=(name, way) not in EAGERLY)


def test_a_view_made_under_no_grad_is_one_outside_too() -> None:
    """What is given back is a view of the input, and no gradient of it reaches the input."""

    def first(x: torch.Tensor) -> torch.Tensor:
        with no_grad():
            return x[0]

    x = torch.randn(3, 4, requires_grad=True)
    got, want = tessera.jit(first)(x), first(x)
    assert got.data_ptr() == x.data_ptr() and got.grad_fn is None and got.requires_grad == want.requires_grad


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.new_zeros((2, 3)),
        lambda x: x.new_full((2,), 3.0),
        lambda x: torch.histc(x, 4),
        lambda x: torch.special.bessel_j0(x),
        lambda x: torch.ops.aten.native_layer_norm(x, x.shape[-1:], None, None, 1e-5),
        lambda x: torch.linalg.lu(x),
        lambda x: torch.sign(x),  # its derivative is zero
    ],
)
def test_results_that_autograd_does_not_follow_say_so_while_they_are_traced(fn) -> None:  # noqa: ANN001
    x, said = torch.randn(3, 3, requires_grad=True), []

    def flags(x: torch.Tensor) -> list[bool]:
        out = fn(x)
        return [y.requires_grad for y in (out if isinstance(out, tuple) else (out,))]

    tessera.grad(lambda x: (said.append(flags(x)), x.sum())[1])(x)
    assert said == [flags(x)]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (*x.split(1), *x.split(2), *x.chunk(4)),  # one operator, and results of different numbers
        lambda x: (x.to(torch.int64), x.to(torch.float64), x.to(torch.int32).to(torch.float32)),
        lambda x: (torch.complex(x, x).real, torch.view_as_real(torch.complex(x, x)).long()),
    ],
)
def test_one_operator_may_be_followed_here_and_not_there(fn) -> None:  # noqa: ANN001
    x, said = torch.randn(4, 3, requires_grad=True), []

    def flags(x: torch.Tensor) -> list[bool]:
        return [y.requires_grad for y in fn(x)]

    tessera.grad(lambda x: (said.append(flags(x)), x.sum())[1])(x)
    assert said == [flags(x)]


def _written_whole(x: torch.Tensor) -> list[torch.Tensor]:
    x.mul_(2)
    return [x, x[0], x.t()]


def _written_by_a_view(x: torch.Tensor) -> list[torch.Tensor]:
    part = x[0:2]
    part.t().mul_(0.5)
    return [part, x, x[-1].permute(0), part.detach(), x.view(torch.int32), x + 1]


def _written_before_the_view(x: torch.Tensor) -> list[torch.Tensor]:
    own = x.clone()
    own.t().mul_(3)
    return [own, own[0], x[1:]]


@pytest.mark.parametrize("fn", [_written_whole, _written_by_a_view, _written_before_the_view])
@pytest.mark.parametrize("leaf", [True, False])
def test_writes_around_which_gradients_are_off_change_no_flag(fn, leaf: bool) -> None:  # noqa: ANN001
    said = []

    def flags(x: torch.Tensor) -> torch.Tensor:
        said.append([y.requires_grad for y in fn(x)])
        return x.sum()

    for call in (flags, tessera.jit(flags, frontend="functional")):
        x = torch.ones(3, 4, requires_grad=True) if leaf else torch.ones(3, 4, requires_grad=True) * 1
        with torch.no_grad():
            call(x)
    assert said[0] == said[1]
