"""Indices that do not fit are refused as eager refuses them, also in a write that nobody reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tessera

ROWS = torch.tensor([0, 2])
EVERY_ROW, EVERY_COLUMN = torch.ones(4, dtype=torch.bool), torch.ones(3, dtype=torch.bool)
MISFITS = {
    "a mask of another length": ((EVERY_COLUMN,), torch.tensor(0.0)),
    "a mask of more dimensions": ((torch.ones(4, 3, 1, dtype=torch.bool),), torch.tensor(0.0)),
    "indices that do not broadcast": ((ROWS, torch.tensor([0, 1, 2])), torch.tensor(0.0)),
    "values of another size": ((ROWS,), torch.zeros(2)),
    "values of more dimensions": ((ROWS,), torch.zeros(1, 2, 3)),
}
FITTING = {
    "a mask": ((EVERY_ROW,), torch.zeros(3)),
    "a mask of the whole": ((torch.ones(4, 3, dtype=torch.bool),), torch.arange(12.0)),
    "a mask and indices": ((torch.tensor([True, False, True, False]), ROWS), torch.tensor([1.0, 2.0])),
    "indices that broadcast": ((ROWS[:, None], ROWS), torch.zeros(2, 2)),
    "values that broadcast": ((ROWS,), torch.arange(3.0)),
}


def unread(x: torch.Tensor, values: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
    (x * 2).index_put_(indices, values)
    return x + 1


def read(x: torch.Tensor, values: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
    return (x * 2).index_put_(indices, values)


def compiled(fn: Callable, frontend: str) -> Callable:
    return tessera.jit(fn, executors=["aten"], frontend=frontend)


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused(name: str, frontend: str, recwarn: pytest.WarningsRecorder) -> None:
    indices, values = MISFITS[name]
    with pytest.raises((IndexError, RuntimeError)) as eager:
        unread(torch.ones(4, 3), values, *indices)
    with pytest.raises(eager.type):
        compiled(unread, frontend)(torch.ones(4, 3), values, *indices)
    assert not [w for w in recwarn if "Please report" in str(w.message)]


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
@pytest.mark.parametrize("name", FITTING)
def test_what_fits_is_written(name: str, frontend: str) -> None:
    indices, values = FITTING[name]
    x = torch.linspace(0, 1, 12).view(4, 3)
    torch.testing.assert_close(compiled(read, frontend)(x, values, *indices), read(x, values, *indices))


def test_a_mask_that_no_longer_fits_when_sizes_change() -> None:
    fast = compiled(lambda x, mask: unread(x, torch.tensor(0.0), mask), "dynamo")
    for n in (4, 5):
        fast(torch.ones(n, 3), torch.ones(n, dtype=torch.bool))
    with pytest.raises(IndexError):
        fast(torch.ones(6, 3), torch.ones(5, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 4), (3, 1, 1, 4)], ids=str)
@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
def test_a_view_that_nobody_reads_is_refused_as_well(shape: tuple[int, ...], frontend: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.abs()[::2].view(-1)
        return x * 2

    torch._dynamo.reset()
    for f in (program, tessera.jit(program, frontend=frontend)):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            f(torch.randn(shape))
