"""What small batched products read in columns is laid out in rows: same numbers, no copy where none is wanted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tessera
from tessera.passes.patterns import product_rows


@pytest.fixture(autouse=True)
def here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_rows, "calls_for_columns", lambda: True)
    torch._dynamo.reset()


def seconds(fast: Callable) -> list[tuple]:
    """The strides of every product's second operand in the final program."""
    final = tessera.stages(fast)[-1].trace
    return [eqn.args[1].tensor.stride for eqn in final.equations if eqn.opname in product_rows.PRODUCTS]  # type: ignore[union-attr]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ (k.mT * 0.5)


def check(fn: Callable, *args: Tensor) -> list[tuple]:
    fast = tessera.jit(fn, executors=["tile", "aten"], strict=True)
    with torch.no_grad():
        got, want = fast(*args), fn(*args)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
    return seconds(fast)


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
def test_the_kernel_before_writes_rows(batch: tuple[int, ...]) -> None:
    q, k = torch.randn(*batch, 24, 32), torch.randn(*batch, 20, 32)
    (stride,) = check(scores, q, k)
    assert stride[-2:] == (20, 1)


def test_an_operand_of_the_caller_is_copied() -> None:
    (stride,) = check(lambda q, k: torch.bmm(q, k.mT), torch.randn(3, 24, 32), torch.randn(3, 20, 32))
    assert stride[-2:] == (20, 1)


def test_one_tensor_twice() -> None:
    x = torch.randn(3, 32, 32)
    (stride,) = check(lambda x: torch.bmm(x, x.mT), x)
    assert stride[-2:] == (32, 1)


def test_any_size() -> None:
    q, k = torch.randn(2, 24, 32), torch.randn(2, 20, 32)
    fast = tessera.jit(scores, executors=["tile", "aten"], dynamic=True)
    with torch.no_grad():
        for rows in (24, 30, 7):
            torch.testing.assert_close(fast(q[:, :rows], k), scores(q[:, :rows], k))


@pytest.mark.parametrize(
    "q, k",
    [
        (torch.randn(3, 1, 32), torch.randn(3, 400, 32)),  # one row
        (torch.randn(3, 8, 8), torch.randn(3, 8, 8)),  # tiny
        (torch.randn(1, 200, 64), torch.randn(1, 200, 64)),  # worth a call
        (torch.randn(3, 24, 32).double(), torch.randn(3, 20, 32).double()),
        (torch.randn(3, 32, 24).mT, torch.randn(3, 20, 32)),  # both in columns
        (torch.randn(3, 24, 32), torch.randn(20, 32).expand(3, 20, 32)),  # one matrix, spread
    ],
)
def test_others_stay(q: Tensor, k: Tensor) -> None:
    for stride in check(lambda q, k: torch.bmm(q, k.mT), q, k):
        assert stride[-2] == 1
