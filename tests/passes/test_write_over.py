"""Operators that write several arguments and give something back write the tensors themselves where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tessera


@torch.library.custom_op("tessera_tests::exchange", mutates_args=("a", "b"))
def exchange(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    a[0] += x
    b[0] -= x
    return x * 2


@exchange.register_fake
def _(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("tessera_tests::accumulate", mutates_args=("sums", "count"))
def accumulate(sums: list[Tensor], x: Tensor, count: Tensor) -> Tensor:
    for i, s in enumerate(sums):
        s.add_(x, alpha=i + 1)
    count.add_(1)
    return x.sum()


@accumulate.register_fake
def _(sums: list[Tensor], x: Tensor, count: Tensor) -> Tensor:
    return x.new_empty(())


def old_read_later(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    before = a * 1
    y = exchange(a, b, x)
    return y + before[0]


def old_view_given(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    kept = a.clone()
    y = exchange(kept, b, x)
    return y, a + kept


def written_again(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    y = exchange(a, b, x)
    exchange(a, b, y)
    a.mul_(2)
    return y


def on_parts(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return exchange(a[1:], b.t()[:, :2].t(), x) + a[1]


def on_own(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    c, d = torch.zeros(3, 4), torch.ones(3, 4)
    y = exchange(c, d, x)
    return y, c * 1, d


def given_back(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return exchange(a, b, x), a


def lists(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return accumulate([a, b], x, a[0, :1].clone()) * 2


PROGRAMS: dict[Callable, int] = {  # how many calls write in place
    lambda a, b, x: exchange(a, b, x) + 1: 1,
    old_read_later: 1,
    old_view_given: 1,
    written_again: 1,
    on_parts: 0,
    on_own: 1,
    given_back: 1,
    lists: 1,
}


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x.clone(),
    "gaps": lambda x: torch.stack((x, x), -1)[..., 0],
    "transposed": lambda x: x.t().contiguous().t() if x.ndim == 2 else x.clone(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_like_eager(fn: Callable, layout: str) -> None:
    torch.manual_seed(0)
    given = [torch.randn(3, 4), torch.randn(3, 4), torch.randn(4)]
    mine, theirs = ([LAYOUTS[layout](x) for x in given] for _ in range(2))
    fast = tessera.jit(fn, strict=True)
    with torch.no_grad(), tessera.override(verify=True):
        for _ in range(2):
            assert_close(fast(*mine), fn(*theirs))
            assert_close(mine, theirs)
    final = list(tessera.stages(fast))[-1].trace
    over = [eqn for eqn in final.equations if str(eqn.op) == "tessera.functional_over"]
    if layout == "dense":
        assert len(over) >= PROGRAMS[fn], final
