"""Grad mode as a program leaves it."""

from __future__ import annotations

from collections.abc import Iterator
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
