"""Numbers that a program asks for and no argument decides are known while it is traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tessera.func.api  # noqa: F401 - enters what is watched while a function is traced
from tessera.frontends.functional.trace import trace_function
from tessera.ir.interp import run
from tessera.util.errors import CaptureError


def mask(n: int) -> Tensor:
    return torch.full((n, n), -torch.inf).triu(1)


def written(x: Tensor) -> Tensor:
    m = torch.zeros(3)
    before = m[1].item()
    m[1] = 5.0
    return x * m[1].item() + before


ASKS: dict[str, Callable] = {
    "bool": lambda x: x * 2 if (mask(4) == mask(4)).all() else x,
    "item": lambda x: x * torch.arange(5).sum().item(),
    "equal": lambda x: x * 2 if torch.equal(mask(3), mask(3).clone()) else x,
    "literal": lambda x: x * int(torch.tensor([1, 2, 3]).sum()),
    "tolist": lambda x: x * sum(torch.linspace(0, 1, 3).tolist()),
    "written": written,
    "cov": lambda x: torch.cov(torch.stack([x, x * x])).sum() * x,
}


@pytest.mark.parametrize("fn", ASKS.values(), ids=ASKS)
def test_known(fn: Callable) -> None:
    x = torch.tensor([1.0, 2.0, 4.0])
    (got,) = run(trace_function(fn, (x,)).trace, x)
    torch.testing.assert_close(got, fn(x))


def mixed(x: Tensor) -> Tensor:
    m = torch.zeros(3)
    m[1] = x[0]
    return x * m.sum().item()


TABLE = torch.ones(3)
UNKNOWN: dict[str, Callable] = {
    "an argument": lambda x: x * 2 if x.sum() > 0 else x,
    "written from one": mixed,
    "drawn": lambda x: x * torch.rand(()).item(),
    "closed over": lambda x: x * TABLE.sum().item(),
}


@pytest.mark.parametrize("fn", UNKNOWN.values(), ids=UNKNOWN)
def test_what_a_run_decides_is_not(fn: Callable) -> None:
    with pytest.raises(CaptureError, match="asks for the value"):
        trace_function(fn, (torch.ones(3),))


@pytest.mark.parametrize("affine", [True, False])
def test_statistics_over_all_batches(affine: bool) -> None:
    norm = nn.BatchNorm1d(3, momentum=None, affine=affine).double()
    norm.get_buffer("num_batches_tracked").fill_(2)
    names = [*(name for name, _ in norm.named_parameters()), *(name for name, _ in norm.named_buffers())]
    held = [norm.get_parameter(n) if n in dict(norm.named_parameters()) else norm.get_buffer(n) for n in names]

    def call(held: list[Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(norm, dict(zip(names, held, strict=True)), (x,))

    x = torch.randn(6, 3, dtype=torch.float64)
    mine = [t.detach().clone() for t in held]
    (got,) = run(trace_function(call, (mine, x)).trace, *mine, x)
    torch.testing.assert_close(got, norm(x).detach())
    for t, want in zip(mine, held, strict=True):
        torch.testing.assert_close(t, want.detach())
