"""Grad mode as a program leaves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tessera.torch_internals.autograd import set_grad_enabled


@contextmanager
def kept_grad_mode() -> Iterator[list[bool]]:
    """Grad mode is afterwards what it was. The list holds what the program left it at, where that is another."""
    before, left = torch.is_grad_enabled(), []
    try:
        yield left
        if torch.is_grad_enabled() != before:
            left.append(not before)
    finally:
        set_grad_enabled(before)


def under_no_grad(fn: Callable, left: list[bool]) -> Callable:
    """A function that finds gradients off, and leaves grad mode as it was. `left` gets True where `fn` left it on."""

    def run(*args: object) -> object:
        with torch.no_grad():
            out = fn(*args)
            if torch.is_grad_enabled():
                left.append(True)
            return out

    return run
