"""Results of a graph that are made of other results of it.

A compiled graph is one node to autograd, which does not see that one result is made of another. In eager, `retain_grad`
and hooks of the inner one, and `torch.autograd.grad` by it, get what flows there from the outer one. So outer results
are given out behind nodes of their own, whose edges lead to the graph and to the inner results. In: a graph's results
as autograd's one node gives them. Out: the same behind such links.

A link passes cotangents on. Only where somebody asks for the gradient of an inner result does it compute what flows
there. The graph's own backward, which computes that flow anyway, takes it off again what arrives at the inner result:
what is left is what others put there, or what a hook has changed.

An inner result may be a view of another one, or of an argument. Autograd makes it, outside the graph; what flows there
arrives at the other one, or before the graph. Or it is the new contents of an argument: the argument is written before
the links are made, which then lead through the history that it has got.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import get_gradient_edge

from tessera.ir.aliased import Aliased
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
    views: tuple[int, ...] = ()


def levels_of(links: Sequence[Sequence[int]], results: int) -> tuple[Level, ...]:
    """`links`: of each result, those that it is made of. Views come after so many results."""
    depth: dict[int, int] = {}

    def depth_of(i: int) -> int:
        if i not in depth:
            depth[i] = 1 + max(map(depth_of, links[i]), default=-1)
        return depth[i]

    by_depth: dict[int, list[int]] = {}
    for i in range(len(links)):
        by_depth.setdefault(depth_of(i), []).append(i)
    levels = []
    for d in sorted(by_depth):
        outer, views = ([i for i in by_depth[d] if (i < results) is result] for result in (True, False))
        outer = outer if d else []  # made of none
        if outer or views:
            levels.append(Level(tuple(outer), tuple(sorted({k for i in outer for k in links[i]})), tuple(views)))
    return tuple(levels)


class Links:
    """What the links of one call of a graph share. It stands in the graph's context."""

    def __init__(self, views: Sequence[Aliased], inputs: Sequence[object], results: Sequence[object]) -> None:
        self.views, self.count = views, len(results)
        self.numbers = [None if isinstance(x, torch.Tensor) else x for x in results] if views else []
        # Of each result and argument that views are of, what it is like.
        self.like = {place: _like(_at(place, inputs, results)) for view in views if (place := _upon(view)) < self.count}
        self.hooks: list[dict] = []
        self.inner: list[weakref.ref[torch.Tensor]] = []
        self.backward = -1  # the one that asked last
        self.asked = False
        # What links brought in this backward, to inner results and to arguments.
        self.flows: dict[int, torch.Tensor] = {}

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
            result, flow = self.arriving(result, flow)
        if flow is not None:
            self.flows[result] = self.flows[result] + flow if result in self.flows else flow

    def arriving(self, place: int, flow: torch.Tensor) -> tuple[int, torch.Tensor | None]:
        """Of what flows to a view, what arrives at the result that it is of. Past one made under no_grad, nothing."""
        views = []
        while place >= self.count:
            views.append(view := self.views[place - self.count])
            place = _upon(view)
        if not views:
            return place, flow
        again = torch.is_grad_enabled()
        shape, strides, dtype, device = self.like[place]
        with torch.enable_grad():
            whole = shown = torch.empty_strided(shape, strides, dtype=dtype, device=device, requires_grad=True)
            for view in reversed(views):
                shown = view.make(shown, self.numbers)
        return place, torch.autograd.grad(shown, whole, flow, create_graph=again, allow_unused=True)[0]

    def take_off(self, cts: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """What arrives at the results without what links brought."""
        if not self.flows or self.backward != backward_in_progress():
            return cts
        rest = list(cts)
        for i in [i for i in self.flows if i >= 0]:
            flow, ct = self.flows.pop(i), rest[i]
            rest[i] = None if ct is None or ct is flow else _less(ct, flow)
        return rest

    def take_off_given(self, grads: list[torch.Tensor | None]) -> None:
        """The same for gradients of arguments: what flows to their views gets there without the graph."""
        if self.flows and self.backward == backward_in_progress():
            for place, flow in self.flows.items():
                if (grad := grads[-1 - place]) is not None:
                    grads[-1 - place] = _less(grad, flow)
        self.flows = {}


def _upon(view: Aliased) -> int:
    """The place of what a view is of: arguments come before the results, from the last to the first."""
    return view.source if view.of_output else -1 - view.source


def _at(place: int, inputs: Sequence[object], results: Sequence[object]) -> torch.Tensor:
    return results[place] if place >= 0 else inputs[-1 - place]  # type: ignore[return-value]


def _like(x: torch.Tensor) -> tuple:
    return x.shape, x.stride(), x.dtype, x.device


def _less(ct: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
    """Infinities that others put nothing to are gone, too."""
    rest = ct - flow
    return rest if torch.is_grad_enabled() else rest.masked_fill_(ct == flow, 0)


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


def linked(
    apply: Callable,
    levels: tuple[Level, ...],
    results: Sequence[int],
    views: Sequence[Aliased],
    written: Mapping[int, int],
    flows: Callable,
) -> Callable:
    """The same graph with its outer results behind links, then views that others are made of, and hooks of all these
    called with gradients alone.

    `results` are those with a gradient, several. `written`: inputs that get a result, in whose place they then stand.
    `flows(ctx, level, cts)`: what flows from the results of a level to those that they are made of.
    """
    inner = {i for level in levels for i in (*level.inner, *level.views)}
    inner |= {view.source for view in views if view.of_output}
    outer = {i for level in levels for i in level.results}
    sources = {place: i for i, place in written.items()}
    first = [place for place in sources if place not in outer]

    def call(*inputs: torch.Tensor) -> Sequence:
        out = apply(*inputs)
        graph, count = out[results[0]].grad_fn, len(out)
        if graph is None and not views and not sources:
            return out
        out = [*out, *[None] * len(views)]
        held = [*out]  # what later results are made of: an input that was written, or the result itself

        def put(places: Iterable[int]) -> None:
            for i in places:
                held[i] = inputs[sources[i]].copy_(out[i]) if i in sources else out[i]

        put(first)
        for level in levels:
            if graph is not None and level.results:
                ends = (*(out[i] for i in level.results), *(held[i] for i in level.inner), _leaf)
                for i, result in zip(level.results, Link.apply(level, flows, *ends), strict=True):
                    out[i] = result
            put(level.results)
            for i in level.views:
                view = views[i - count]
                out[i] = held[i] = view.make(_at(_upon(view), inputs, held), out)
        if graph is None:
            return out
        for i in (*results, *(i for level in levels for i in level.views)):
            take_hooks(held[i], hooks := Hooks())
            if i in inner:
                graph.links.watch(held[i], hooks)
        return out

    return call
