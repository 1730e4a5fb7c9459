"""Joins a forward and a backward program to PyTorch's autograd.

In: two compiled traces and what the split says about them. Out: a function over the graph's inputs whose
results have a grad_fn that runs the backward program. One `torch.autograd.Function` per graph; what the
forward saved lives in its context and is freed as eager's saved tensors are: each with its last reader, unless the
graph is kept. `backward` takes a list of the saved values and the cotangents, and empties it. Where gradients will be
differentiated again (`create_graph`), `again` runs in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.autograd import forward_ad

from tessera.ir.aliased import Aliased
from tessera.ir.strides import resolved, with_strides
from tessera.ir.types import contiguous_strides, overlaps_itself
from tessera.runtime import batched, leaf_hooks
from tessera.runtime.lent import lend
from tessera.runtime.linked import Level, Links, levels_of, linked
from tessera.runtime.proxies import Context, make_proxies, pass_on
from tessera.runtime.saved import as_read, restoring, tied
from tessera.torch_internals.autograd import DUAL_LEVEL, result_metadata, tensor_hooks
from tessera.torch_internals.dispatch import BelowADInplaceOrView
from tessera.torch_internals.frames import skip_frames
from tessera.util.errors import DoubleBackwardError

# Below views as well: a result that a program made as a view is a tensor of its own to autograd, and may be written.
below_autograd = BelowADInplaceOrView


@dataclass(frozen=True)
class Bridge:
    """How flat results and cotangents line up with the two programs."""

    results: int  # how many results of the forward are the caller's; the others are saved
    passive: tuple[int, ...]  # results that carry no gradient
    pulled: tuple[int, ...]  # result behind each cotangent of the backward, in order
    wrt: tuple[int, ...]  # input behind each gradient
    inputs: int
    tensors: tuple[int, ...]  # saved values that are tensors, by position among the saved
    numbers: tuple[int, ...]  # saved values that are numbers
    own: tuple[int, ...]  # of each saved value, the input that it is, or -1
    unsaved: tuple[int, ...]  # inputs that gradients depend on and nothing saves: proxies are saved in their place
    lent: tuple[int, ...]  # inputs without a gradient that nothing saves or writes; their owners may keep them
    reached: tuple[tuple[int, ...], ...]  # cotangents that each gradient is made of, by position in `pulled`
    cut: tuple[int, ...]  # inputs that no result depends on: autograd does not hear of them, nor do their hooks
    edges: tuple[int, ...]  # of each input, its place among a node's `next_functions`, which are those of tensors
    # Of each cotangent, the cotangents behind each gradient that it is added to; None where more than that is done.
    merges: tuple[tuple[tuple[int, ...], ...] | None, ...]
    contiguous: tuple[int, ...]  # cotangents that backward takes contiguous, however their results lie
    # Saved tensors, by position among them, that may lie in the memory of these results.
    shares: tuple[tuple[int, tuple[int, ...]], ...]
    outputs: tuple[int, ...] = ()  # of each output of the core, its place among the results
    # Of each result, the results that it is made of, if by way of no other one; nothing where none is made of another.
    links: tuple[tuple[int, ...], ...] = ()
    # Views that results are made of: each of a result or an input, or of a view before it. Their places come after
    # those of the results. `viewed`: which of the caller's outputs they are.
    views: tuple[Aliased, ...] = ()
    viewed: tuple[int, ...] = ()
    # Inputs that are written before results are linked that are made of what they hold then, and the results they get.
    written: tuple[tuple[int, int], ...] = ()
    lacking: bool = False  # inputs that nobody knows any more may be None: autograd has no edge to them


def bridge(
    forward: Callable, backward: Callable, plan: Bridge, again: Callable, flows: Callable | None = None
) -> Callable:
    """The forward as a differentiable function of its inputs.

    `again(ctx, restore, cts)` gives the gradients as differentiable functions of what they depend on;
    `flows(ctx, restore, level, cts)` what flows between results (`runtime/linked.py`).
    """
    levels = levels_of(plan.links, plan.results)
    results, tensors, numbers, pulled = plan.results, plan.tensors, plan.numbers, plan.pulled
    in_order, unsaved, whole = not numbers, plan.unsaved, len(tensors) + len(numbers)
    own = [k for k, position in enumerate(tensors) if plan.own[position] >= 0]
    restore = restoring(tensors, numbers, plan.own, bool(unsaved))
    # Inputs that only some results lead to, and a backward may not reach.
    partial = [i for i, reached in zip(plan.wrt, plan.reached, strict=True) if len(reached) < len(pulled)]

    def shown(inputs: Sequence[object], out: Sequence[object]) -> Sequence[object]:
        """The results, with inputs that get some of them in their place."""
        out = list(out)
        for i, place in plan.written:
            out[place] = inputs[i]
        return out

    def some_alone(missing: set[int]) -> bool:
        """Whether something is computed of a missing cotangent. Zeros do in its place where they are only added."""
        parts = [plan.merges[k] for k in missing]
        return any(part is None or any(missing.issuperset(other) for other in part) for part in parts)

    def gradients(ctx: Context, cts: list[torch.Tensor | None], partly: bool = False) -> Sequence[torch.Tensor | None]:
        """One for each of `wrt`. `partly`: some cotangents are missing."""
        seeds = list(map(laid_out, cts, ctx.strides))  # type: ignore[attr-defined]
        if partly or torch.is_grad_enabled() or (getattr(forward_ad, DUAL_LEVEL) >= 0 and any(map(_moves, cts))):
            return again(ctx, restore, seeds)
        given = restore(ctx)
        given[whole:] = seeds
        # Unless the graph is kept, the list is all that holds them now.
        ctx.maybe_clear_saved_tensors()  # type: ignore[attr-defined]
        with below_autograd():
            return backward(given)

    def of_some(ctx: Context, cts: list[torch.Tensor | None]) -> Sequence[torch.Tensor | None] | None:
        """Gradients without the missing cotangents; None where nothing saved what their program reads: zeros do."""
        try:
            return gradients(ctx, cts, partly=True)
        except DoubleBackwardError:
            return None

    def between(ctx: Context, level: Level, cts: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """What flows from the results of a level to what they are made of."""
        assert flows is not None

        def flow(ctx: Context, cts: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
            strides = (ctx.strides[pulled.index(i)] for i in level.results)  # type: ignore[attr-defined]
            return flows(ctx, restore, level, list(map(laid_out, cts, strides)))

        if not batched.active():
            return flow(ctx, cts)
        return batched.rows(flow, ctx, zeros_for(ctx, level.results, cts))

    class TesseraGraph(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):  # noqa: ANN001, ANN002, ANN205
            with below_autograd():
                out = forward(*inputs)
            saved = out[results:]
            ctx.set_materialize_grads(False)  # a result that takes no part in what is differentiated says so
            ctx.strides = [out[i].stride() for i in pulled]
            if levels:
                ctx.links = Links(plan.views, inputs, shown(inputs, out[:results]))
            ctx.edges = edges_to(isinstance(x, torch.Tensor) for x in inputs) if plan.lacking else plan.edges
            for k in plan.contiguous:
                ctx.strides[k] = contiguous_strides(out[pulled[k]].shape)
            if plan.passive:
                ctx.mark_non_differentiable(*[out[i] for i in plan.passive if isinstance(out[i], torch.Tensor)])
            given = out[:results]
            if not in_order:
                ctx.numbers = [saved[i] for i in numbers]
                saved = [saved[i] for i in tensors]
            if own:
                saved = as_read(saved, own)
            if partial:
                there = (i for i in partial if inputs[i] is not None)
                ctx.hooks = {i: hooks for i in there if (hooks := tensor_hooks(inputs[i]))}
            lent = plan.lent
            if unsaved:
                proxies = make_proxies(ctx, [inputs[i] for i in unsaved])
                saved, given = (*saved, *proxies), (*given, *proxies)
                lent = (*lent, *(unsaved[place] for place in ctx.proxied))
            if lent:
                ctx.lent = {i: lend(inputs[i]) for i in lent}
            if plan.shares:
                saved = tied(saved, out, plan.shares)
            ctx.save_for_backward(*saved)
            return given

        @staticmethod
        def backward(ctx, *cts):  # noqa: ANN001, ANN002, ANN205
            aligned: list = [None] * plan.inputs
            if unsaved:
                pass_on(ctx, cts[results:], aligned, unsaved)
            if levels:
                cts = ctx.links.take_off(cts)
            seeds = [cts[i] for i in pulled]
            missing = {k for k, ct in enumerate(seeds) if ct is None}
            unreached = [missing.issuperset(reached) for reached in plan.reached] if missing else []
            for position, spared in zip(plan.wrt, unreached, strict=False):
                if spared:
                    leaf_hooks.spare(edge_to(ctx, position))
                    leaf_hooks.spare_hooks(ctx.hooks.get(position, {}) if partial else {})
            if len(missing) == len(seeds):
                return tuple(aligned)
            grads = of_some(ctx, seeds) if missing and some_alone(missing) and not batched.active() else None
            if grads is None:
                if missing:
                    seeds = zeros_for(ctx, pulled, seeds)
                grads = batched.rows(gradients, ctx, seeds) if batched.active() else gradients(ctx, seeds)
            for k, (position, grad) in enumerate(zip(plan.wrt, grads, strict=True)):
                if missing and unreached[k]:
                    continue  # nothing flows here, and autograd gives no gradient
                aligned[position] = grad if aligned[position] is None else _sum(aligned[position], grad)
            if levels:
                ctx.links.take_off_given(aligned)
            return tuple(aligned)

    # A user's function that asks for gradients between two graphs runs under Dynamo, which looks at every frame that
    # begins: what was compiled already, and all it calls, is left alone.
    skip_frames(TesseraGraph.backward.__code__)
    apply = _detached(TesseraGraph.apply, plan.cut) if plan.cut else TesseraGraph.apply
    if unsaved:
        apply = _first(apply, results)
    links = len(pulled) > 1 or plan.views
    return linked(apply, levels, pulled, plan.views, dict(plan.written), between) if links else apply


def _first(apply: Callable, count: int) -> Callable:
    return lambda *args: apply(*args)[:count]


def _detached(apply: Callable, cut: tuple[int, ...]) -> Callable:
    """The same without a way back to some inputs."""

    def call(*inputs: torch.Tensor) -> tuple:
        given = list(inputs)
        for i in cut:
            given[i] = given[i].detach()
        return apply(*given)

    return call


def zeros_for(ctx: Context, places: Sequence[int], cts: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Cotangents of the results at these places, zeros for those that are missing."""
    known = result_metadata(ctx)
    like = (known[i] for i in places)
    return [
        torch.zeros(of.shape, dtype=of.dtype, device=of.device) if ct is None else ct
        for ct, of in zip(cts, like, strict=True)
    ]


def laid_out(ct: torch.Tensor | None, stride: tuple[int, ...]) -> torch.Tensor | None:
    """A cotangent in the layout of the result it belongs to: the backward program was made for that layout, and for
    memory that holds what the tensor does."""
    if ct is None:
        return None
    ct = resolved(ct)
    if ct.stride() == stride:
        return ct
    if overlaps_itself(ct.shape, stride):
        return ct.contiguous()
    return with_strides(ct, stride)


def with_grad(core: Callable) -> Callable:
    """The same under no_grad, with gradients. Under inference_mode there are none, whoever turns them on."""

    def call(*args):  # noqa: ANN002, ANN202
        with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
            return core(*args)

    return call


def edges_to(tensors: Iterable[bool]) -> tuple[int, ...]:
    """Of each input, how many tensors stand before it, and how many there are: autograd counts nothing else."""
    return tuple(accumulate(map(int, tensors), initial=0))


def edge_to(ctx: Any, i: int) -> Any:
    """The node that made an input; None of one without a gradient, or that was not there."""
    return None if ctx.edges[i] == ctx.edges[i + 1] else ctx.next_functions[ctx.edges[i]][0]


def _moves(ct: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(ct).tangent is not None


def _sum(a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    return a if b is None else a + b
