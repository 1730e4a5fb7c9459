"""Running a program twice in one process: compiled and stored the first time, loaded the second."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from programs import same_bits

import tessera
from tessera.executors import tile
from tessera.just_in_time.compiled import compiled_state
from tessera.store.program import COUNTS
from tessera.tile.targets import named

Results = list[object]


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """How many programs were stored and loaded inside."""
    before, found = dict(COUNTS), {}
    yield found
    found.update({name: COUNTS[name] - before[name] for name in COUNTS})


def forget() -> None:
    """As in a new process: nothing compiled is left but what is on disk."""
    torch._dynamo.reset()
    tile._launchers.clear()
    if (target := named("cpu")) is not None:
        target._compiled.clear()  # type: ignore[attr-defined]


def trained(model: torch.nn.Module, args: tuple, **options: object) -> Results:
    """Loss, gradients and buffers after a forward and a backward of a copy."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    fast = tessera.jit(model, strict=True, **options)  # type: ignore[arg-type]
    out = fast(*args)
    loss = out if isinstance(out, torch.Tensor) else out[0]
    loss.float().sum().backward()
    grads = [p.grad for p in model.parameters()]
    return [out, *grads, *model.buffers(), fast]


def called(fn: Callable, args: tuple, **options: object) -> Results:
    """Results, and arguments as they were left."""
    args = copy.deepcopy(args)
    torch.manual_seed(1)
    fast = tessera.jit(fn, strict=True, **options)  # type: ignore[arg-type]
    out = fast(*args)
    return [*(out if isinstance(out, tuple) else (out,)), *args, fast]


def check_loaded(
    run: Callable[[], Results], graphs: int = 1, same: Callable[[object, object], bool] = same_bits
) -> tuple[object, object]:
    """Compiled, then loaded: the same, bit for bit unless said otherwise. Gives the two jitted functions."""
    forget()
    with counting() as found:
        first = run()
    assert found == {"stored": graphs, "loaded": 0}, found
    forget()
    with counting() as found:
        second = run()
    assert found == {"stored": 0, "loaded": graphs}, found
    *left, compiled = first
    *right, loaded = second
    assert all(map(same, left, right)) and len(left) == len(right)
    assert [c.from_cache for c in compiled_state(compiled).compilations()] == [False] * graphs  # type: ignore[union-attr]
    assert [c.from_cache for c in compiled_state(loaded).compilations()] == [True] * graphs  # type: ignore[union-attr]
    return compiled, loaded
