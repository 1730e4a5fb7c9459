"""Threads that compile at once do not see each other's programs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import tessera
from tessera.util.stack import Stack


def together(work: Callable[[int], None], count: int = 4) -> None:
    """Runs in several threads at once; what goes wrong in one is raised here."""
    failures: list[Exception] = []

    def run(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_every_thread_has_a_stack_of_its_own() -> None:
    stack: Stack[int] = Stack()
    stack.append(7)

    def work(number: int) -> None:
        assert len(stack) == 0
        stack.append(number)
        assert stack[-1] == number and stack.pop() == number

    together(work)
    assert stack[-1] == 7 and len(stack) == 1


@pytest.mark.parametrize("frontend", ["functional", "dynamo"])
def test_programs_compiled_at_once(frontend: str) -> None:
    torch._dynamo.reset()

    def work(number: int) -> None:
        for n in range(2):
            scale = float(number * 2 + n)

            def f(x: torch.Tensor, scale: float = scale) -> torch.Tensor:
                return F.softmax(x * scale + 1, -1).sum(0) * 2

            x = torch.randn(5 + number, 9, requires_grad=True)
            got, want = tessera.jit(f, frontend=frontend, strict=True)(x), f(x)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x))

    together(work)


def test_transforms_at_once() -> None:
    def work(number: int) -> None:
        x = torch.randn(3 + number)
        for _ in range(3):
            torch.testing.assert_close(tessera.grad(lambda x: (x * number).sin().sum())(x), number * (x * number).cos())

    together(work)
