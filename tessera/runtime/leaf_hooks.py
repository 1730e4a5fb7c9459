"""Hooks of leaves that a backward does not reach.

A compiled graph is one node to autograd, whichever of its results is differentiated. Autograd goes on from it to all of
its inputs, and calls the hooks of a leaf with None where no gradient came. Eager has a node for every operator and
never gets there. So hooks of such a leaf are told apart: they run where there is a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tessera.torch_internals.autograd import hooks_of


@dataclass(frozen=True)
class OnGradient:
    """A tensor's hook, called with gradients alone."""

    hook: Callable

    def __call__(self, grad: torch.Tensor | None) -> object:
        return None if grad is None else self.hook(grad)


class Arrival:
    """Notes whether a gradient came this time."""

    came = False

    def __call__(self, grad: torch.Tensor | None) -> None:
        self.came = grad is not None


@dataclass(frozen=True)
class AfterGradient:
    """A hook that runs once a gradient was added to a leaf's, where one was."""

    hook: Callable
    arrival: Arrival

    def __call__(self, leaf: torch.Tensor) -> None:
        if self.arrival.came:
            self.hook(leaf)


def spare(node: object) -> None:
    """Let the hooks of this node's leaf, if it is one's, run only where a gradient comes."""
    leaf = getattr(node, "variable", None)
    if leaf is None:
        return
    before, after = hooks_of(leaf)
    for key, hook in before.items():
        if not isinstance(hook, (OnGradient, Arrival)):
            before[key] = OnGradient(hook)
    unspared = {key: hook for key, hook in after.items() if not isinstance(hook, AfterGradient)}
    if unspared:
        arrival = Arrival()
        leaf.register_hook(arrival)
        after.update({key: AfterGradient(hook, arrival) for key, hook in unspared.items()})
