"""Gradients that are differentiated again (`create_graph=True`), gradients of some results alone, and by results.

In: the context of a graph whose backward runs, what its forward saved, cotangents. Out: the gradients, as results of
another compiled graph over the inputs of the first one, what it saved, and the cotangents. That graph is compiled when
it is first asked for, and is differentiated by the same bridge: so any order works. A cotangent may be None: what eager
would not compute is then not computed, where zeros times infinity would be NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tessera.runtime.autograd import Bridge, edge_to
from tessera.runtime.lent import borrow
from tessera.runtime.linked import Level
from tessera.runtime.proxies import Context
from tessera.runtime.saved import Restore, of_leaf
from tessera.util.errors import DoubleBackwardError

Wanted = tuple[bool | None, ...]


@dataclass(frozen=True)
class Derivative:
    """The compiled graph. It takes the inputs, what was saved and is none of them, then cotangents."""

    call: Callable[..., tuple]
    reads: frozenset[int]  # inputs whose contents it wants
    names: tuple[str, ...]  # of its inputs
    devices: tuple[torch.device | None, ...]  # where it expects them
    cotangents: tuple[int, ...]  # those that it takes, of those that are there


class DoubleBackward:
    def __init__(
        self, plan: Bridge, make: Callable[[Wanted, bool, Level | None], Derivative], written: frozenset[int]
    ) -> None:
        """`make` compiles for cotangents that do or do not need gradients themselves, or are missing, and for gradients
        that will or will not be differentiated again. With a level of results the cotangents are theirs, and the
        gradients those of what they are made of. `written`: inputs that the graph itself writes."""
        self.plan, self.make, self.written = plan, make, written
        self.compiled: dict[tuple[Wanted, bool, Level | None], Derivative] = {}

    def __call__(self, ctx: Context, restore: Restore, cts: list[torch.Tensor | None]) -> tuple:
        once = not torch.is_grad_enabled() and any(ct is None for ct in cts)
        gradients = self.gradients(ctx, restore, cts, once)
        ctx.maybe_clear_saved_tensors()  # type: ignore[attr-defined]
        return gradients

    def between(self, ctx: Context, restore: Restore, level: Level, cts: list[torch.Tensor | None]) -> tuple:
        """What flows from the results of a level to what they are made of. The graph's own backward comes later."""
        return self.gradients(ctx, restore, cts, not torch.is_grad_enabled(), level)

    def gradients(
        self, ctx: Context, restore: Restore, cts: list[torch.Tensor | None], once: bool, level: Level | None = None
    ) -> tuple:
        key = tuple(None if ct is None else ct.requires_grad and not once for ct in cts), not once, level
        if key not in self.compiled:
            self.compiled[key] = self.make(*key)
        derivative = self.compiled[key]
        saved = restore(ctx, self.needed(derivative) if once else None)
        others = [_still(s) for s, i in zip(saved, self.plan.own, strict=False) if i < 0]
        there = [ct for ct in cts if ct is not None]
        args = [*self.inputs(ctx, saved, derivative), *others, *(there[k] for k in derivative.cotangents)]
        return derivative.call(*map(_moved, args, derivative.devices))

    def needed(self, derivative: Derivative) -> set[int]:
        """The saved values whose contents it wants, by position."""
        extra = itertools.count(self.plan.inputs)
        return {k for k, i in enumerate(self.plan.own) if (i if i >= 0 else next(extra)) in derivative.reads}

    def inputs(self, ctx: Context, saved: list, derivative: Derivative) -> list[object]:
        """The graph's inputs as far as they are still known: what was saved of them, leaves, proxies, and what their
        owners have kept."""
        plan = self.plan
        inputs: list[object] = [None] * plan.inputs
        for s, i in zip(saved, plan.own, strict=False):
            if i >= 0:
                inputs[i] = s
        lost = set(range(plan.inputs)) - {i for i in plan.own if i >= 0}
        for s, place in zip(saved[len(plan.own) :], getattr(ctx, "proxied", ()), strict=True):
            inputs[plan.unsaved[place]] = s
        for i in plan.wrt:
            leaf = None if (node := edge_to(ctx, i)) is None else getattr(node, "variable", None)
            if leaf is not None and inputs[i] is None:
                inputs[i] = leaf
                lost -= {i} - self.written
            elif leaf is not None:
                inputs[i] = of_leaf(leaf, inputs[i])  # type: ignore[arg-type]
        for i in lost & getattr(ctx, "lent", {}).keys():  # those too that only the next derivative reads
            x = borrow(ctx.lent[i])  # type: ignore[attr-defined]
            if x is not None and x.grad_fn is edge_to(ctx, i):
                inputs[i] = x
                lost.remove(i)
        if missing := sorted(lost & derivative.reads):
            raise DoubleBackwardError(
                f"expected the contents of the input {derivative.names[missing[0]]!r} of a compiled graph, which the "
                "gradient of its gradient depends on, but its backward has no use for them and they were not saved"
                f"{', and the graph writes it' if missing[0] in self.written else ''}; "
                "make it a leaf (requires_grad_()), or compile the function that computes the first gradient with "
                "tessera.grad inside"
            )
        return inputs


def no_forward_mode(*_: object) -> tuple:
    raise DoubleBackwardError(
        "expected gradients to be differentiated in reverse mode, got a forward-mode tangent in a compiled backward; "
        "compute the forward inside torch.autograd.forward_ad.dual_level() too"
    )


def _still(s: object) -> object:
    """A saved value itself; results of the graph are saved with their history, which the inputs bring here."""
    return s.detach() if isinstance(s, torch.Tensor) else s


def _moved(x: object, device: torch.device | None) -> object:
    """What waited on the host, where it is wanted. The copy to the host may still be under way."""
    if device is None or not isinstance(x, torch.Tensor) or x.device == device:
        return x
    torch.accelerator.synchronize()
    return x.to(device)
