"""Inputs that a graph does not save and that are no leaves with a gradient, for as long as their owners keep them.

A gradient that is differentiated again may want what they hold, though the first one does not. Keeping them would keep
their memory too, in every training step; so a weak reference is noted, and what tells whether the tensor still holds
what it held.
"""

from __future__ import annotations

import weakref

import torch

from tessera.torch_internals.autograd import version_of

Lent = tuple[weakref.ref[torch.Tensor], int, int]


def lend(x: torch.Tensor | None) -> Lent | None:
    if x is None:  # the graph of a backward, whose own forward has lost it
        return None
    try:
        return weakref.ref(x), version_of(x), x.data_ptr()
    except RuntimeError:  # a tensor of inference mode has no version, one of torch.func no memory
        return None


def borrow(lent: Lent | None) -> torch.Tensor | None:
    """The input, if it is there and was not written since."""
    x = None if lent is None else lent[0]()
    return x if x is not None and lent is not None and (version_of(x), x.data_ptr()) == lent[1:] else None
