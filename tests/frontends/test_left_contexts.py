"""Whatever raises, and wherever: the switches of PyTorch stand as they did before the call."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from fuzz.switches import switches
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessera


def _not_recorded(x: torch.Tensor) -> torch.Tensor:
    """Windows overlap, so that no recording takes the write."""
    y = x.sin()
    windows, swapped = y.unfold(0, 2, 1), torch.tensor([1, 0])
    windows.index_copy_(1, swapped, windows.index_select(1, swapped) * 2)
    return y.sum()


def _refused(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x.sin(), x[:, :2]).expand(3).sum()


def _within(context: Callable) -> Callable:
    def wrap(f: Callable) -> Callable:
        def call(x: torch.Tensor) -> object:
            with context():
                return f(x)

        return call

    return wrap


PLACES: dict[str, Callable] = {
    "no_grad": _within(torch.no_grad),
    "autocast": _within(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "inference_mode": _within(torch.inference_mode),
    "dual_level": _within(forward_ad.dual_level),
    "hooks": _within(lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here")),
    "sdpa_kernel": _within(lambda: sdpa_kernel(SDPBackend.MATH)),
    "jvp": lambda f: lambda x: tessera.jvp(f, (x,), (x,)),
    "jvp of jvp": lambda f: lambda x: tessera.jvp(lambda y: tessera.jvp(f, (y,), (y,))[1], (x,), (x,)),
    "grad": lambda f: lambda x: tessera.grad(f)(x),
    "vjp": lambda f: lambda x: tessera.vjp(f, x)[1](x.sum()),
    "vmap": lambda f: lambda x: tessera.vmap(f)(x.expand(2, 4, 4)),
    "vmap of grad": lambda f: lambda x: tessera.vmap(tessera.grad(f))(x.expand(2, 4, 4)),
    "jacfwd": lambda f: lambda x: tessera.jacfwd(f)(x),
    "hessian": lambda f: lambda x: tessera.hessian(f)(x),
}
WAYS: dict[str, Callable] = {
    "transform": lambda f: f,
    "dynamo": lambda f: tessera.jit(f, executors=["aten"]),
    "strict": lambda f: tessera.jit(f, executors=["aten"], strict=True),
    "functional": lambda f: tessera.jit(f, executors=["aten"], frontend="functional"),
}


FAILURES = [(_not_recorded, place) for place in PLACES] + [(_refused, "autocast"), (_refused, "hessian")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("program", "place"), FAILURES)
def test_no_switch_is_left_changed(program: Callable, place: str, way: str) -> None:
    torch._dynamo.reset()
    x, before, failure = torch.randn(4, 4), switches(), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            WAYS[way](PLACES[place](program))(x)
        except Exception as error:
            failure = error
    assert switches() == before
    assert failure is not None or program is _not_recorded


def test_what_is_not_recorded_runs_eagerly_within_a_forward_level() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return tessera.jvp(_not_recorded, (x,), (x.cos(),))[1]

    x = torch.randn(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = tessera.jit(program, executors=["aten"])(x)
    torch.testing.assert_close(got, torch.func.jvp(_not_recorded, (x,), (x.cos(),))[1])
