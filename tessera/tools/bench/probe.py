"""The measured side of the benchmarks: one function a task, run in a child by `measure.in_fresh_process`.

A contestant is a way to compile a callable. A task gives plain JSON: seconds, or seconds by contestant.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FunctionType

import torch
from torch import Tensor

import tessera
from tessera.tools.bench.measure import Samples, cpu_seconds, interleave
from tessera.tools.models import GPT, GPTConfig

Compile = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]

CONTESTANTS: dict[str, Compile] = {
    "eager": lambda f: f,
    "dynamo": lambda f: torch.compile(f, backend="eager"),
    "aot_eager": lambda f: torch.compile(f, backend="aot_eager"),
    "inductor": lambda f: torch.compile(f, backend="inductor"),
    "thunder": lambda f: import_module("thunder").jit(f),
    "tessera": lambda f: tessera.jit(f),
    "tessera[aten]": lambda f: tessera.jit(f, executors=["aten"]),
    "tessera[tile]": lambda f: tessera.jit(f, executors=["rows", "attention", "sdpa", "tile", "aten"]),
    "tessera[functional]": lambda f: tessera.jit(f, frontend="functional"),
}


def compile_cost(who: str, layers: int, backward: bool) -> float:
    """CPU seconds of a GPT's first call, by a compiler that has already compiled one tiny function."""
    compile_, model = CONTESTANTS[who], GPT(GPTConfig(layers=layers))
    tiny = torch.ones(2, requires_grad=backward)
    idx, targets = _tokens(model.config)
    with torch.set_grad_enabled(backward):
        warm = compile_(lambda x: x.sin() * 2)(tiny)
        if backward:
            warm.sum().backward()
        start = cpu_seconds()
        if backward:
            compile_(model)(idx, targets).backward()
        else:
            compile_(model)(idx)
        return cpu_seconds() - start


def call_overhead(who: Sequence[str], rounds: int, repeat: int, backward: bool) -> Samples:
    """CPU seconds per call of `a + b` on 2x2 tensors, optionally with its backward from a given cotangent."""
    a, b = (torch.ones(2, 2, requires_grad=backward) for _ in range(2))
    cotangent = torch.ones(2, 2)

    def task(name: str) -> Callable[[], object]:
        fast = CONTESTANTS[name](fresh(_add))

        def forward() -> Tensor:
            return fast(a, b)

        def forward_backward() -> None:
            a.grad = b.grad = None
            torch.autograd.backward(fast(a, b), cotangent)

        return forward_backward if backward else forward

    return interleave({name: task(name) for name in who}, rounds=rounds, repeat=repeat)


def training_step(who: Sequence[str], rounds: int, repeat: int) -> Samples:
    """CPU seconds of one steady step: forward, loss, backward. Each contestant has its own equal model."""
    model = GPT(GPTConfig())
    idx, targets = _tokens(model.config)

    def task(name: str) -> Callable[[], object]:
        own = copy.deepcopy(model)
        fast = CONTESTANTS[name](own)

        def step() -> None:
            own.zero_grad(set_to_none=True)
            fast(idx, targets).backward()

        return step

    return interleave({name: task(name) for name in who}, rounds=rounds, repeat=repeat)


def _tokens(config: GPTConfig) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(config.vocab, (1, config.context + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def fresh(function: Callable) -> Callable:
    """The same function with a code object of its own.

    Dynamo keeps its cache on the code object: sharing one, contestants would search each other's entries.
    """
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


TASKS: dict[str, Callable[..., object]] = {task.__name__: task for task in (compile_cost, call_overhead, training_step)}


def main(task: str, options: str) -> None:
    """Run one task on one thread from a fixed seed and print its result."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(TASKS[task](**json.loads(options))))


if __name__ == "__main__":
    main(*sys.argv[1:])
