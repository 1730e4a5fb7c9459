"""Writes in programs whose sizes change: type rules, strides of what is made of the written tensor, shared memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tessera
from tessera.util.errors import CaptureError

FRONTENDS = ["dynamo", "functional"]
SIZES = (3, 5, 4, 7)  # one of them is a size that does not change


def transposed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.t()
    y.scatter_(1, y.argsort(1), 0.25)
    return y.exp(), x + 1


def every_second_row(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.zeros(2 * x.shape[0], x.shape[1], dtype=x.dtype).t()[:, ::2]
    y.copy_(x.t())
    return y + 1, y.triu_().exp()


def columns_first(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.expand(2, *x.shape).permute(1, 2, 0).clone()
    y.index_add_(0, torch.tensor([0, 1]), y[:2].clone())
    return y * 2, y.sum(1)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("program", [transposed, every_second_row, columns_first])
def test_what_is_made_of_a_written_tensor_lies_as_it_does(program: Callable, frontend: str) -> None:
    fast = tessera.jit(program, executors=["aten"], frontend=frontend, strict=True)
    for n in SIZES:
        want, got = (f(torch.linspace(-1, 1, 4 * n).view(n, 4)) for f in (program, fast))
        torch.testing.assert_close(got, want)
        assert [y.stride() for y in got] == [y.stride() for y in want]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_write_that_broadcasts(frontend: str) -> None:
    def program(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = x.sigmoid()
        return y.addcmul_(scale, scale).addcdiv_(x[:1], scale)

    fast = tessera.jit(program, executors=["aten"], frontend=frontend, strict=True)
    for n in SIZES:
        x, scale = torch.linspace(-1, 1, n), torch.tensor(2.0)
        torch.testing.assert_close(fast(x, scale), program(x, scale))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_views_of_a_written_result_share_its_memory(frontend: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = (x.t() @ x).tensor_split(2, 1)
        left.select(0, 0).mul_(3)
        return right, left, left

    fast = tessera.jit(program, executors=["aten"], frontend=frontend, strict=True)
    for n in SIZES:
        for grad in (False, True):
            x = torch.linspace(-1, 1, 3 * n).view(3, n).requires_grad_(grad)
            want, got = program(x), fast(x)
            torch.testing.assert_close(got, want)
            assert [y.stride() for y in got] == [y.stride() for y in want]
            assert got[1] is got[2] and got[0].untyped_storage()._cdata == got[1].untyped_storage()._cdata


def test_an_argument_that_is_written_and_then_changes_its_shape() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.unsqueeze_(0) + 1

    with pytest.raises(CaptureError, match="shape of an input"):
        tessera.jit(program, frontend="functional")(torch.ones(3))
    fast, x = tessera.jit(program), torch.ones(3)
    assert torch.equal(fast(x), torch.full((1, 3), 3.0)) and x.shape == (1, 3)
