"""Under no_grad a view requires gradients if its base does, and a copy never: some operators make one or the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tessera

OPERATORS: dict[str, Callable] = {
    "contiguous": lambda x: x.contiguous(),
    "reshape": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(),
    "to": lambda x: x.to(torch.float64),
    "to with a copy": lambda x: x.to(torch.float32, copy=True),
    "transposed": lambda x: x.t().contiguous(),
}
INPUTS: dict[str, Callable] = {
    "rows": lambda n: torch.ones(4, n).requires_grad_(),
    "columns": lambda n: torch.ones(n, 4).requires_grad_().t(),
    "a leaf of columns": lambda n: torch.ones(n, 4).t().requires_grad_(),
}


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
@pytest.mark.parametrize("name", OPERATORS)
def test_copies_and_views(name: str, frontend: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            y = OPERATORS[name](x)
        return y, y * 2

    fast = tessera.jit(program, executors=["aten"], frontend=frontend, strict=True)
    for n in (4, 6, 8):
        for make in INPUTS.values():
            want, got = program(make(n)), fast(make(n))
            assert [y.requires_grad for y in got] == [y.requires_grad for y in want]
