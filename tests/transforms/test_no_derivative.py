"""Operators whose derivative PyTorch does not have: as in eager, only who asks for it hears so, by an error of the same
class, and nobody is asked to report a fault."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tessera
from tessera.util.errors import DerivativeError

B = torch.tensor([[1.0, 0.25], [0.25, 2.0]])

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "igamma": lambda a: torch.igamma(a, B),
    "igammac": lambda a: torch.igammac(a, B),
    "zeta": lambda a: torch.special.zeta(a + 2, B),
    "heaviside": lambda a: torch.heaviside(a, B),
    "histogram": lambda a: torch.histogram(a, bins=4, range=(0.0, 3.0)).hist,
    "ldl_factor": lambda a: torch.linalg.ldl_factor(a).LD,
    "geqrf": lambda a: torch.geqrf(a).a,
}


def error_of(fn: Callable) -> Exception:
    with pytest.raises(RuntimeError) as caught:
        fn()
    return caught.value


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", OPERATORS)
def test_jit(name: str) -> None:
    """The call gives what eager gives, and so does the gradient of what does not lead through the operator."""

    def f(a: Tensor) -> tuple[Tensor, Tensor]:
        return OPERATORS[name](a), a.sin()

    fast, errors = tessera.jit(f), []
    for call in (f, fast):
        a = B.clone().requires_grad_()
        out, other = call(a)
        torch.testing.assert_close((out, other), f(B))
        assert out.requires_grad
        (g,) = torch.autograd.grad(other.sum(), a)
        torch.testing.assert_close(g, B.cos())
        errors.append(error_of(lambda out=out: out.sum().backward()))
    assert (type(errors[1]), str(errors[1])) == (type(errors[0]), str(errors[0]))
    torch.testing.assert_close(fast(B), f(B))


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("transform", ["grad", "jacrev", "hessian"])
def test_transforms(name: str, transform: str) -> None:
    def f(a: Tensor) -> Tensor:
        return OPERATORS[name](a).sum()

    ours = error_of(lambda: getattr(tessera, transform)(f)(B))
    assert isinstance(ours, type(error_of(lambda: getattr(torch.func, transform)(f)(B))))
    assert isinstance(ours, DerivativeError)


def test_train_step() -> None:
    model = nn.Linear(2, 2, bias=False)
    step = tessera.train_step(
        model, lambda m, x: torch.igamma(m(x).exp(), x).sum(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = error_of(lambda: step(B))
    assert isinstance(error, NotImplementedError)
    assert not [w for w in caught if "report" in str(w.message)]


def test_what_eager_can_differentiate_is_not_concerned() -> None:
    """By the other operand; and twice through kernels whose own backward has no derivative."""
    x = B.clone().requires_grad_()
    torch.testing.assert_close(
        tessera.grad(lambda b: torch.igamma(B, b).sum())(B), torch.func.grad(lambda b: torch.igamma(B, b).sum())(B)
    )

    def penalty(f: Callable) -> Tensor:
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    def f(x: Tensor) -> Tensor:
        return nn.functional.silu(x) + nn.functional.mish(x) + x.clone().copy_(x.tanh())

    torch.testing.assert_close(penalty(tessera.jit(f, strict=True)), penalty(f))
