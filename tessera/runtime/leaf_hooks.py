"""Hooks of tensors and of modules that a backward does not reach.

A compiled graph is one node to autograd, whichever of its results is differentiated. Autograd goes on from it to all of
its inputs, and calls the hooks of a leaf with None where no gradient came. Eager has a node for every operator and
never gets there. So hooks of such a leaf are told apart: they run where there is a gradient. So are those of other
tensors that a graph takes, and the full backward hooks of a module before the graph, which would get zeros, and hand
them on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from tessera.torch_internals.autograd import hooks_of, hooks_of_ends, module_was_entered


@dataclass(frozen=True)
class OnGradient:
    """A tensor's hook, called with gradients alone."""

    hook: Callable

    def __call__(self, grad: torch.Tensor | None) -> object:
        return None if grad is None else self.hook(grad)


class Hooks(OrderedDict):
    """The hooks of a tensor, which are called with gradients alone."""

    def __setitem__(self, key: int, hook: Callable) -> None:
        super().__setitem__(key, OnGradient(hook))


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


@dataclass(frozen=True)
class OnSomeGradient:
    """A node's hook, called where a gradient came to the node, or to what its module gave: eager goes on from there
    through all of the module, with None where there is no gradient. Otherwise none goes on."""

    hook: Callable

    def __call__(self, after: Sequence[torch.Tensor | None], before: Sequence[torch.Tensor | None]) -> object:
        came = any(grad is not None for grad in before) or module_was_entered(self.hook)
        return self.hook(after, before) if came else (None,) * len(after)


def spare(node: Any) -> None:
    """Let the hooks of this node's leaf, or of its module, if it is one's, run only where a gradient comes. So do those
    behind a module: eager's own operators hand on that none came, and the module's ends would make zeros of it."""
    _spare_leaf(node)
    waiting, seen = _behind(node) if _spare_module(node) else [], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        _spare_leaf(node)
        if _spare_module(node) or not isinstance(node, BackwardCFunction):  # functions decide by themselves
            waiting += _behind(node)


def spare_hooks(hooks: dict) -> None:
    """The same of a tensor's own hooks, by the dictionary that holds them."""
    for key, hook in hooks.items():
        if not isinstance(hook, (OnGradient, Arrival)):
            hooks[key] = OnGradient(hook)


def _behind(node: Any) -> list:
    return [node for node, _ in node.next_functions if node is not None]


def _spare_module(node: object) -> bool:
    """Whether it is an end of a module whose hooks ran at all times until now."""
    ends = hooks_of_ends(node) or {}
    unspared = {key: OnSomeGradient(hook) for key, hook in ends.items() if not isinstance(hook, OnSomeGradient)}
    ends.update(unspared)
    return bool(unspared)


def _spare_leaf(node: object) -> None:
    leaf = getattr(node, "variable", None)
    if leaf is None:
        return
    before, after = hooks_of(leaf)
    spare_hooks(before)
    unspared = {key: hook for key, hook in after.items() if not isinstance(hook, AfterGradient)}
    if unspared:
        arrival = Arrival()
        leaf.register_hook(arrival)
        after.update({key: AfterGradient(hook, arrival) for key, hook in unspared.items()})
