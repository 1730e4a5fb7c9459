"""What `requires_grad` and the grad mode say inside nested transforms: torch.func's own answers, level by level."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tessera

Function = Callable[[Tensor, Tensor], Tensor]


def pulled(T: Any, f: Function, a: Tensor, b: Tensor) -> Tensor:
    out, pull = T.vjp(lambda a: f(a, b), a)
    return pull(torch.ones_like(out))[0]


# The first argument is mapped, or differentiated by; the second one as the name says.
KINDS: dict[str, Callable[[Any, Function, Tensor, Tensor], Tensor]] = {
    "grad": lambda T, f, a, b: T.grad(lambda a, b: f(a, b).sum())(a, b),
    "grad_by_both": lambda T, f, a, b: T.grad(lambda a, b: f(a, b).sum(), argnums=(0, 1))(a, b)[1],
    "vmap": lambda T, f, a, b: T.vmap(f, in_dims=(0, None))(a, b),
    "vmap_of_both": lambda T, f, a, b: T.vmap(f)(a, b),
    "jvp": lambda T, f, a, b: T.jvp(lambda a: f(a, b), (a,), (a * 1,))[1],
    "vjp": pulled,
}
NESTS = [(k,) for k in KINDS] + list(itertools.product(KINDS, KINDS))
NESTS += [("grad_by_both", k, "vmap") for k in KINDS] + [("vmap", "grad", k) for k in KINDS]


def answers(T: Any, nest: tuple[str, ...], free: Tensor) -> dict[str, bool]:
    """Of arguments, of what is closed over at the level before, and of what is made of each."""
    said: dict[str, bool] = {}

    def innermost(a: Tensor, b: Tensor, closed: Tensor) -> Tensor:
        with torch.no_grad():
            quiet = a * 3
        seen = dict(a=a, b=b, closed=closed, of_a=a * 2, of_b=b * 2, of_closed=closed * 2, of_both=a + b, quiet=quiet)
        seen |= dict(detached=b.detach(), view=a[...], view_of_b=b[...], view_of_closed=closed[...], new=torch.ones(3))
        said.update({name: x.requires_grad for name, x in seen.items()}, mode=torch.is_grad_enabled())
        return (a + b) * closed

    def at(level: int, a: Tensor, b: Tensor, closed: Tensor) -> Tensor:
        if level == len(nest):
            return innermost(a, b, closed)
        return KINDS[nest[level]](T, lambda c, d: at(level + 1, c, d, a if level else closed), a, b)

    at(0, torch.ones(3, 3), torch.ones(3, 3), free)
    return said


@pytest.mark.parametrize("nest", NESTS, ids="-".join)
@pytest.mark.parametrize("grad", [True, False], ids=["", "no_grad"])
def test_nested_transforms_say_what_torch_func_says(nest: tuple[str, ...], grad: bool) -> None:
    for free in (torch.ones(3, 3), torch.ones(3, 3, requires_grad=True)):
        with torch.set_grad_enabled(grad):
            assert answers(tessera, nest, free) == answers(torch.func, nest, free)


def asks(x: Tensor, w: Tensor) -> Tensor:
    """Its value tells what it was told."""
    y = x * (2 if x.requires_grad else 3) * (5 if (x * 1).requires_grad else 7)
    return y * (11 if (w * 1).requires_grad else 13) * (17 if torch.is_grad_enabled() else 19)


class Asking(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return asks(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return g, g


BODIES = {
    "plain": asks,
    "checkpoint": lambda x, w: checkpoint(asks, x, w, use_reentrant=False),
    "function": Asking.apply,
    "cond": lambda x, w: torch.cond(x.sum() > 0, asks, lambda x, w: x * 1.0, (x, w)),
    "detached": lambda x, w: checkpoint(asks, x.detach(), w, use_reentrant=False),
}


@pytest.mark.parametrize("name", list(BODIES))
@pytest.mark.parametrize("grad", [True, False], ids=["", "no_grad"])
def test_bodies_say_what_is_said_around_them(name: str, grad: bool) -> None:
    fast = tessera.jit(BODIES[name], frontend="functional")
    for flags in itertools.product([False, True], repeat=2):
        x, w = (torch.ones(2, requires_grad=f) for f in flags)
        with torch.set_grad_enabled(grad):
            assert torch.equal(fast(x, w), BODIES[name](x, w)), flags


@pytest.mark.parametrize("grad", [True, False], ids=["", "no_grad"])
def test_what_vmap_does_not_map_says_what_it_says_outside(grad: bool) -> None:
    def program(T: Any) -> Function:
        return lambda x, w: T.vmap(lambda _: asks(x, w))(torch.ones(2))

    fast = tessera.jit(program(tessera), frontend="functional")
    for flags in itertools.product([False, True], repeat=2):
        x, w = (torch.ones(2, requires_grad=f) for f in flags)
        with torch.set_grad_enabled(grad):
            assert torch.equal(fast(x, w), program(torch.func)(x, w)), flags


def in_modes(x: Tensor) -> Tensor:
    with torch.no_grad():
        constant = x.sin()
    with torch.enable_grad():
        kept = x.exp()
    return x * constant + kept * (2 if torch.is_grad_enabled() else 3)


AROUND = {"grad": torch.enable_grad, "no_grad": torch.no_grad}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("inside", AROUND)
def test_a_mapped_function_turns_gradients_on_and_off(around: str, inside: str) -> None:
    def program(T: Any, x: Tensor) -> Tensor:
        with AROUND[around]():
            return T.vmap(AROUND[inside]()(in_modes))(x)

    x = torch.tensor([0.3, 1.2, -0.5], requires_grad=True)
    seen = []
    for T in (torch.func, tessera):
        out = program(T, x)
        grads = [torch.autograd.grad(out.sum(), x)[0]] if out.requires_grad else []
        grads.append(T.grad(lambda y, T=T: program(T, y).sum())(x.detach()))
        grads.append(T.vmap(T.grad(lambda y, T=T: program(T, y[None]).sum()))(x.detach()))
        seen.append((out.detach(), grads))
    torch.testing.assert_close(seen[1], seen[0])
