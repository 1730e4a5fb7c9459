"""Results of a graph that are made of other results of it.

A compiled graph is one node to autograd, which does not see that one result is made of another. In eager, `retain_grad`
and hooks of the inner one, and `torch.autograd.grad` by it, get what flows there from the outer one. So outer results
are given out behind nodes of their own, whose edges lead to the graph and to the inner results. In: a graph's results
as autograd's one node gives them. Out: the same behind such links.

A link passes cotangents on. Only where somebody asks for the gradient of an inner result does it compute what flows
there. The graph's own backward, which computes that flow anyway, takes it off again what arrives at the inner result:
what is left is what others put there, or what a hook has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import get_gradient_edge

from tessera.runtime.leaf_hooks import Hooks
from tessera.torch_internals.autograd import backward_in_progress, is_reached, take_hooks
from tessera.torch_internals.frames import skip_frames

# A leaf that nobody asks the gradient of: a backward goes there only if it is for all leaves.
_leaf = torch.zeros((), requires_grad=True)
_at_leaf = get_gradient_edge(_leaf).node


@dataclass(frozen=True)
class Level:
    """Results that are made of others, and not of each other."""

    results: tuple[int, ...]
    inner: tuple[int, ...]  # what they are made of, if by way of nothing else that is given out


def levels_of(links: Sequence[Sequence[int]]) -> tuple[Level, ...]:
    """`links`: of each result, those that it is made of."""
    depth: dict[int, int] = {}

    def depth_of(i: int) -> int:
        if i not in depth:
            depth[i] = 1 + max(map(depth_of, links[i]), default=-1)
        return depth[i]

    by_depth: dict[int, list[int]] = {}
    for i in range(len(links)):
        by_depth.setdefault(depth_of(i), []).append(i)
    inner = {d: tuple(sorted({k for i in members for k in links[i]})) for d, members in by_depth.items()}
    return tuple(Level(tuple(by_depth[d]), inner[d]) for d in sorted(by_depth) if d)


class Links:
    """What the links of one call of a graph share. It stands in the graph's context."""

    def __init__(self) -> None:
        self.hooks: list[dict] = []
        self.inner: list[weakref.ref[torch.Tensor]] = []
        self.backward = -1  # the one that asked last
        self.asked = False
        self.flows: dict[int, torch.Tensor] = {}  # what links brought to inner results in this backward

    def watch(self, result: torch.Tensor, hooks: dict) -> None:
        self.hooks.append(hooks)
        self.inner.append(weakref.ref(result))

    def ask(self) -> bool:
        """Whether somebody wants the gradient of an inner result of the backward that runs."""
        if self.backward != (current := backward_in_progress()):
            self.backward, self.flows = current, {}
            there = [t for one in self.inner if (t := one()) is not None]
            named = bool(there) and not is_reached(_at_leaf)  # a backward for tensors that were named: these, perhaps
            self.asked = named or any(self.hooks) or any(t.retains_grad for t in there)
        return self.asked

    def add(self, result: int, flow: torch.Tensor | None) -> None:
        if flow is not None:
            self.flows[result] = self.flows[result] + flow if result in self.flows else flow

    def take_off(self, cts: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """What arrives at the results without what links brought."""
        if not self.flows or self.backward != backward_in_progress():
            return cts
        rest, flows, self.flows = list(cts), self.flows, {}
        for i, flow in flows.items():
            ct = rest[i]
            rest[i] = None if ct is None or ct is flow else ct - flow
        return rest


class Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx, level, flows, *tensors):  # noqa: ANN001, ANN002, ANN205
        ctx.level, ctx.flows = level, flows
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in tensors[: len(level.results)])

    @staticmethod
    def backward(ctx, *cts):  # noqa: ANN001, ANN002, ANN205
        graph, level = ctx.next_functions[0][0], ctx.level
        inner: Sequence[torch.Tensor | None] = [None] * len(level.inner)
        if graph.links.ask() and any(ct is not None for ct in cts):
            inner = ctx.flows(graph, level, cts)
            for i, flow in zip(level.inner, inner, strict=True):
                graph.links.add(i, flow)
        return (None, None, *cts, *inner, None)


skip_frames(Link.backward.__code__)


def linked(apply: Callable, levels: tuple[Level, ...], results: Sequence[int], flows: Callable) -> Callable:
    """The same graph with its outer results behind links, and hooks of its results called with gradients alone.

    `results` are those with a gradient, several. `flows(ctx, level, cts)`: what flows from the results of a level to
    those that they are made of.
    """
    inner = {i for level in levels for i in level.inner}

    def call(*inputs: object) -> Sequence:
        out = apply(*inputs)
        graph = out[results[0]].grad_fn
        if graph is None:
            return out
        out = list(out)
        for level in levels:
            leaf = (_leaf,) if level is levels[0] else ()  # other levels lead to that one
            behind = Link.apply(level, flows, *[out[i] for i in level.results], *[out[i] for i in level.inner], *leaf)
            for i, result in zip(level.results, behind, strict=True):
                out[i] = result
        for i in results:
            take_hooks(out[i], hooks := Hooks())
            if i in inner:
                graph.links.watch(out[i], hooks)
        return out

    return call
