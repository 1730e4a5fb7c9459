"""While Dynamo traces for Tessera, the collector of garbage waits; then it is as the user left it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tessera


@pytest.fixture(params=[True, False], ids=["collecting", "not collecting"])
def collects(request: pytest.FixtureRequest):  # noqa: ANN201
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def watched(seen: list[bool]) -> Callable[[Tensor], Tensor]:
    @torch.compiler.assume_constant_result  # runs while Dynamo traces
    def look() -> int:
        seen.append(gc.isenabled())
        return 2

    return lambda x: x * look()


def test_it_waits_while_a_program_is_traced(collects: bool, fresh: None) -> None:
    seen: list[bool] = []
    torch.testing.assert_close(tessera.jit(watched(seen))(torch.ones(2)), torch.full((2,), 2.0))
    assert seen == [False] and gc.isenabled() == collects


def test_other_backends_are_left_alone(collects: bool, fresh: None) -> None:
    tessera.jit(torch.sin)(torch.ones(2))
    seen: list[bool] = []
    torch.compile(watched(seen), backend="eager")(torch.ones(2))
    assert seen == [collects]


def test_it_goes_on_after_an_error(collects: bool, fresh: None) -> None:
    def f(x: Tensor) -> Tensor:
        return x @ x  # vectors of two lengths: the trace fails, then eager does

    with pytest.raises(RuntimeError, match="inconsistent tensor size|size mismatch|must match"):
        tessera.jit(lambda x: f(x) + torch.dot(x, x[1:]))(torch.ones(2))
    assert gc.isenabled() == collects
