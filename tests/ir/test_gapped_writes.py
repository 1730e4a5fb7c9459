"""A tensor with gaps in its memory that a program writes, and views of it afterwards: types say how the values lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tessera
from tessera.util.config import override


def masked(x: Tensor) -> None:
    x[x > 0] = 3.0
    x[:, 1:].sub_(1)


def view_before(x: Tensor) -> None:
    v = x[:, 1:]
    x[x > 0] = 3.0
    v[..., 1:].sub_(1)


def view_of_views(x: Tensor) -> Tensor:
    x.mul_(2)
    x[1:].t()[1:].add_(1)
    return x.diagonal() * 2


def through_a_view(x: Tensor) -> Tensor:
    x[:, 1:].exp_()
    return x.unsqueeze(0)[:, 1:].transpose(0, 1) + 1


def several(x: Tensor) -> Tensor:
    x.index_fill_(0, torch.tensor([1]), 2.0)
    a, b, c = x.unbind(1)
    a.add_(b)
    return c.view(3, 1) * x.split(2)[0].sum()


@pytest.mark.parametrize("program", [masked, view_before, view_of_views, through_a_view, several])
@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
@pytest.mark.parametrize("turned", [False, True])
def test_views_of_what_was_written(program: Callable, frontend: str, turned: bool) -> None:
    def given() -> Tensor:
        memory = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return memory[:, ::2].t() if turned else memory[:, ::2]

    x, y = given(), given()
    with override(verify=True):
        got = tessera.jit(program, frontend=frontend, strict=True)(y)  # type: ignore[arg-type]
    torch.testing.assert_close((got, y), (program(x), x))
