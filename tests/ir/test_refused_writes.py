"""What eager PyTorch refuses, a compiled program refuses: writes over what they read, views of rows that lie apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tessera

PLACES = torch.arange(4)


def shifted_copy(x: Tensor) -> Tensor:
    x[1:] = x[:-1]
    return x


def dead_view(x: Tensor) -> Tensor:
    y = x.clamp(min=0)
    y.repeat(2).view(-1, 1, 2)[::2].view(-1)
    return y


REFUSED = {
    "rows beside": lambda x: x[1:].add_(x[:-1]),
    "another rank": lambda x: x[None].sub_(x),
    "another order": lambda x: x.view(2, 2).t().mul_(x.view(2, 2)),
    "of a result": lambda x: shifted_copy(x * 2),
    "out=": lambda x: torch.clamp(x[1:], 0, 1, out=x[:-1]),
    "scatter itself": lambda x: x.scatter_add_(0, PLACES, x),
    "index itself": lambda x: x.index_put_((PLACES,), x[:]),
    "gather itself": lambda x: torch.gather(x, 0, PLACES, out=x),
    "list": lambda x: torch.ops.aten._foreach_add_.List([x[1:]], [x[:-1]]),
    "view": dead_view,
}
TAKEN = {
    "itself": lambda x: x.mul_(x),
    "the same elements": lambda x: x.add_(x[:]),
    "halves": lambda x: x[:2].add_(x[2:]),
    "every second": lambda x: x[::2].add_(x[1::2]),
    "matrix itself": lambda x: x.view(2, 2).addmm_(x.view(2, 2), x.view(2, 2)),
    "scan": lambda x: x.cumsum_(0),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
def test_what_eager_refuses_is_refused(name: str, frontend: str) -> None:
    fn = REFUSED[name]
    with pytest.raises(RuntimeError):
        fn(torch.arange(4.0))
    with pytest.raises(RuntimeError):
        tessera.jit(fn, executors=["aten"], frontend=frontend)(torch.arange(4.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TAKEN)
def test_what_eager_takes_is_compiled(name: str) -> None:
    fn: Callable = TAKEN[name]
    want, got = torch.arange(4.0), torch.arange(4.0)
    compiled = tessera.jit(fn, executors=["aten"], strict=True)
    torch.testing.assert_close(compiled(got), fn(want))
    torch.testing.assert_close(got, want)


def test_sizes_that_are_symbols() -> None:
    for fn in (shifted_copy, dead_view):
        compiled = tessera.jit(fn, dynamic=True)
        with pytest.raises(RuntimeError, match="clone|view size"):
            compiled(torch.arange(6.0))


@torch.library.custom_op("refused_writes::two", mutates_args=("a", "b"))
def two(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    a.add_(x)
    b.mul_(x)
    return a * b


@two.register_fake
def _(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(a)


def twice(x: Tensor) -> Tensor:
    torch.ops.aten._foreach_add_.Scalar([x, x], 1.0)
    return x


SHARED = {  # name -> (the program, whether it is compiled)
    "written twice": (lambda x: two(x, x, torch.full((4,), 3.0)), False),
    "read and written": (lambda x: two(x, torch.ones(4), x), False),
    "in part": (lambda x: two(x[1:], x[:-1], torch.full((3,), 3.0)), False),
    "in turn": (lambda x: two(x[::2], x[1::2], torch.full((2,), 3.0)), True),
    "columns": (lambda x: two(x.view(2, 2)[:, 0], x.view(2, 2)[:, 1], torch.full((2,), 3.0)), True),
    "list": (twice, False),
}


@pytest.mark.parametrize("name", SHARED)
def test_an_operator_that_is_given_one_memory_twice(name: str) -> None:
    fn, compiles = SHARED[name]
    want, got = torch.arange(4.0), torch.arange(4.0)
    compiled = tessera.jit(fn, executors=["aten"])
    torch.testing.assert_close(compiled(got), fn(want))
    torch.testing.assert_close(got, want)
    assert bool(compiled.__tessera__.compilations()) == compiles  # type: ignore[attr-defined]
