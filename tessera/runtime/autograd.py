"""Joins a forward and a backward program to PyTorch's autograd.

In: two compiled traces and what the split says about them. Out: a function over the graph's inputs whose
results have a grad_fn that runs the backward program. One `torch.autograd.Function` per graph; what the
forward saved lives in its context and is freed as eager's saved tensors are: each with its last reader, unless the
graph is kept. `backward` takes a list of the saved values and the cotangents, and empties it. Where gradients will be
differentiated again (`create_graph`), `again` runs in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd import forward_ad

from tessera.ir.types import overlaps_itself
from tessera.runtime import batched, stand_in

below_autograd = torch._C._AutoDispatchBelowAutograd
# A user's function that asks for gradients between two graphs runs under Dynamo, which looks at every frame that
# begins: what was compiled already, and all it calls, is left alone.
_UNSEEN = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)

Context = torch.autograd.function.FunctionCtx


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
    still: tuple[int, ...]  # inputs of `wrt` that get no gradient, whatever the cotangents are
    stand_ins: tuple[int, ...]  # inputs that gradients depend on and nothing saves: something is saved in their place


def bridge(forward: Callable, backward: Callable, plan: Bridge, again: Callable) -> Callable:
    """The forward as a differentiable function of its inputs.

    `again(ctx, saved, cts)` gives the gradients as differentiable functions of what they depend on.
    """
    results, tensors, numbers, pulled = plan.results, plan.tensors, plan.numbers, plan.pulled
    in_order, stand_ins, count = not numbers, plan.stand_ins, len(tensors)
    whole = count + len(numbers)

    def restore(ctx: Context) -> list:
        """What forward saved, in order, then the stand-ins. What saved nothing may run twice, as in eager."""
        saved = ctx.saved_tensors if count else ()  # type: ignore[attr-defined]
        if in_order:
            return list(saved)
        merged: list = [None] * whole
        for position, t in zip(tensors, saved[:count], strict=True):
            merged[position] = t
        for position, n in zip(numbers, ctx.numbers, strict=True):  # type: ignore[attr-defined]
            merged[position] = n
        return [*merged, *saved[count:]]

    def gradients(ctx: Context, cts: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """One for each of `wrt`."""
        laid = zip(cts, ctx.strides, strict=True)  # type: ignore[attr-defined]
        seeds = [ct if ct.stride() == s else laid_out(ct, s) for ct, s in laid]
        given = restore(ctx)
        if torch.is_grad_enabled() or (forward_ad._current_level >= 0 and any(map(_moves, cts))):
            return again(ctx, given, seeds)
        given[whole:] = seeds
        # Unless the graph is kept, the list is all that holds them now.
        ctx.maybe_clear_saved_tensors()  # type: ignore[attr-defined]
        with below_autograd():
            return backward(given)

    class TesseraGraph(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):  # noqa: ANN001, ANN002, ANN205
            if still:  # hidden from autograd, which would go on to where they come from
                inputs = [x[0] if i in still else x for i, x in enumerate(inputs)]
            with below_autograd():
                out = forward(*inputs)
            saved = out[results:]
            ctx.strides = [out[i].stride() for i in pulled]
            if plan.passive:
                ctx.mark_non_differentiable(*[out[i] for i in plan.passive if isinstance(out[i], torch.Tensor)])
            given = out[:results]
            if not in_order:
                ctx.numbers = [saved[i] for i in numbers]
                saved = [saved[i] for i in tensors]
            if stand_ins:
                made = stand_in.make(ctx, [inputs[i] for i in stand_ins], [out[i] for i in pulled])
                saved, given = (*saved, *made), (*given, *made)
            ctx.save_for_backward(*saved)
            return given

        @staticmethod
        def backward(ctx, *cts):  # noqa: ANN001, ANN002, ANN205
            aligned: list = [None] * plan.inputs
            seeds = [cts[i] for i in pulled]
            if stand_ins and not stand_in.arrive(ctx, seeds, cts[results:], aligned, stand_ins):
                return tuple(aligned)
            grads = batched.rows(gradients, ctx, seeds) if batched.active() else gradients(ctx, seeds)
            for position, grad in zip(plan.wrt, grads, strict=True):
                aligned[position] = grad if aligned[position] is None else _sum(aligned[position], grad)
            return tuple(aligned)

    set_code_exec_strategy(TesseraGraph.backward.__code__, _UNSEEN)
    apply, still = TesseraGraph.apply, frozenset(plan.still)
    if not stand_ins and not still:
        return apply
    return lambda *args: apply(*[(x,) if i in still else x for i, x in enumerate(args)])[:results]


def laid_out(ct: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A cotangent in the layout of the result it belongs to: the backward program was made for that layout."""
    if overlaps_itself(ct.shape, stride):
        return ct.contiguous()
    return torch.empty_strided(ct.shape, stride, dtype=ct.dtype, device=ct.device).copy_(ct)


def with_grad(core: Callable) -> Callable:
    """The same under no_grad, with gradients. Under inference_mode there are none, whoever turns them on."""

    def call(*args):  # noqa: ANN002, ANN202
        with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
            return core(*args)

    return call


def _moves(ct: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(ct).tangent is not None


def _sum(a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    return a if b is None else a + b
