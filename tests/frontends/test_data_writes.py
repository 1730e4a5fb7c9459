"""Writes through `.data`, which autograd does not see: gradients are those of eager, which reads the new contents."""

import pytest
import torch

import tessera
from tessera.util.config import config


def operand_saved(x):
    out = x.sin()
    x.data.mul_(2)
    return out


def result_saved(x):
    out = x.exp()
    out.data.zero_()
    return out * 2


def made_inside(x):
    h = x * 2
    out = h.sin()
    h.data.mul_(3)
    return out


def view_saved(x):
    out = x[1:].sin()
    x.data[1] = 5.0
    return out


def updated(x):
    out, d = x.sin(), x.data
    d += 1
    return out


def factor_saved(x):
    with torch.no_grad():
        scale = x.abs().mean()
    out = x / scale
    scale.data.mul_(2)
    return out


def detached_saved(x):
    seen = x.detach()
    out = x * seen
    seen.data.mul_(2)
    return out


def written_first(x):
    x.data.clamp_(-0.2, 0.2)
    return x.sin()


def read_without_gradients(x):
    with torch.no_grad():
        out = x.sin()
    x.data.mul_(2)
    return out + x.cos()


def never_written(x):
    return x.sin() + x.data.cos()


EAGER = (operand_saved, result_saved, made_inside, view_saved, updated, factor_saved, detached_saved)
COMPILED = (written_first, read_without_gradients, never_written)


def run(fn, start):
    x = start.clone().requires_grad_()
    out = fn(x)
    out.sum().backward()
    return out.detach(), x.detach(), x.grad


@pytest.mark.filterwarnings("ignore:Tessera could not compile")
@pytest.mark.parametrize("fn", EAGER + COMPILED, ids=lambda f: f.__name__)
def test_gradients_after_a_write_through_data(fn):
    start, fast = torch.randn(4), tessera.jit(fn)
    for _ in range(2):
        torch.testing.assert_close(run(fast, start), run(fn, start))
    assert bool(tessera.explain(fast).eager) == (fn in EAGER)


def shared_view(x):
    out = x.reshape(-1)
    out.data.mul_(3)
    return out


@pytest.mark.filterwarnings("ignore:Tessera could not compile")
@pytest.mark.parametrize("fn", [operand_saved, result_saved, made_inside, written_first, shared_view])
def test_gradients_inside_the_program(fn):
    """Tensors under a level of torch.func have no memory of their own; what they wrap has."""

    def pulled(x):
        out, pull = torch.func.vjp(lambda x: fn(x * 1), x)
        return out, pull(torch.ones_like(out))

    x = torch.randn(4)
    fast = tessera.jit(pulled, executors=["aten"])
    torch.testing.assert_close(fast(x), pulled(x))
    assert "Wrapper" not in str(tessera.explain(fast))


@pytest.mark.filterwarnings("ignore:Tessera cannot trace")
@pytest.mark.parametrize("fn", EAGER + COMPILED + (shared_view,), ids=lambda f: f.__name__)
def test_gradients_of_a_transform(fn):
    """A traced function knows the values that were read; torch.func takes over where eager would read other ones."""

    def total(x):
        return fn(x * 1).sum()

    rows = torch.randn(2, 4)
    want = torch.stack([torch.func.grad(total)(x) for x in rows])
    torch.testing.assert_close(tessera.grad(total)(rows[0]), want[0])
    torch.testing.assert_close(tessera.vmap(tessera.grad(total))(rows), want)


def test_a_transform_takes_writes_through_data_before_any_use(monkeypatch):
    def program(x, w):
        w.data.clamp_(-0.2, 0.2)
        return (x * w).sum()

    x, w = torch.randn(2, 4)
    monkeypatch.setattr(config, "strict", True)  # torch.func does not take over
    torch.testing.assert_close(tessera.grad(program)(x, w.clone()), w.clamp(-0.2, 0.2))


def hidden(x):
    x[:1].data.mul_(0.25)
    return x * 2


def seen_as_well(x):
    x[:1].data.mul_(0.25)
    return x.mul_(1) * 2


@pytest.mark.parametrize("fn", [hidden, seen_as_well], ids=lambda f: f.__name__)
def test_versions_do_not_count_a_write_through_data(fn):
    """A view keeps its history, and what an earlier program saved of it may still be read."""

    def observed(f):
        leaf = torch.ones(4, 3, requires_grad=True)
        x = leaf[:]
        history, y = x.grad_fn, x * x
        with torch.no_grad():
            f(x)
        try:
            y.sum().backward()
        except RuntimeError as refused:
            return x._version, x.grad_fn is history, type(refused)
        return x._version, x.grad_fn is history, leaf.grad.tolist()

    torch._dynamo.reset()
    assert observed(tessera.jit(fn)) == observed(fn)


def test_a_write_to_what_carries_no_gradient_and_others_are_multiplied_by():
    def program(x, w):
        hidden = x[:1].data
        out = x[:1] @ w
        hidden.mul_(3)
        return out

    def observed(f):
        x, w = torch.arange(1.0, 9.0).view(2, 4), torch.ones(4, 4, requires_grad=True)
        f(x, w).sum().backward()
        return w.grad.tolist(), x.tolist()

    torch._dynamo.reset()
    assert observed(tessera.jit(program)) == observed(program)
