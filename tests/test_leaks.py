"""What was compiled goes with the function it was compiled for."""

from __future__ import annotations

import gc
import linecache
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tessera
from tessera.ir.trace import Trace
from tessera.pipeline.compilation import Compilation

ROUNDS = 4


@pytest.fixture(autouse=True)
def frozen() -> None:
    """What earlier tests left is not looked at, so that collecting takes milliseconds, not seconds."""
    gc.collect()
    gc.freeze()


def function() -> None:
    tessera.jit(lambda x: (x * 2).relu())(torch.ones(4))


def with_a_break() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y.relu()

    tessera.jit(broken)(torch.ones(4))


def module() -> None:
    tessera.jit(nn.Linear(3, 2))(torch.ones(1, 3)).sum().backward()


def step() -> None:
    model = nn.Linear(3, 2)
    tessera.train_step(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1))(torch.ones(1, 3))


def functional() -> None:
    tessera.jit(lambda x: (x * 2).relu(), frontend="functional")(torch.ones(4))


def gradient() -> None:
    tessera.grad(lambda x: (x * x).sum())(torch.ones(3))


def _alive() -> Counter[str]:
    while gc.collect():  # what goes may let go of more
        pass
    kinds = {Trace: "trace", Compilation: "compilation", torch.fx.Graph: "graph"}
    found = Counter(kinds[type(o)] for o in gc.get_objects() if type(o) in kinds)
    found["text"] = sum("tessera" in file and file.startswith("<") for file in linecache.cache)
    found["global"] = sum(name.startswith(("__compiled_fn", "__resume_at")) for name in globals())
    return found


@pytest.mark.parametrize("compile_one", [function, with_a_break, module, step, functional, gradient])
def test_nothing_stays_of_what_is_dropped(compile_one: Callable[[], None]) -> None:
    for _ in range(ROUNDS):  # kernels, and a few traces last asked about, are kept for whoever wants the same again
        compile_one()
    before = _alive()
    for _ in range(ROUNDS):
        compile_one()
    grown = _alive() - before
    assert not grown, f"{ROUNDS} more compilations left {dict(grown)}"
