"""Joins a forward and a backward program to PyTorch's autograd.

In: two compiled traces and what the split says about them. Out: a function over the graph's inputs whose
results have a grad_fn that runs the backward program. One `torch.autograd.Function` per graph; what the
forward saved lives in its context and is freed as eager's saved tensors are: each with its last reader, unless the
graph is kept. `backward` takes a list of the saved values and the cotangents, and empties it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from tessera.ir.types import overlaps_itself
from tessera.util.errors import DoubleBackwardError

# Below views as well: a result that a program made as a view is a tensor of its own to autograd, and may be written.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView
# A user's function that asks for gradients between two graphs runs under Dynamo, which looks at every frame that
# begins: what was compiled already, and all it calls, is left alone.
_UNSEEN = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


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
    reached: tuple[tuple[int, ...], ...]  # cotangents that each gradient is made of, by position in `pulled`


class _Refuse(torch.autograd.Function):
    """Stands behind gradients that were computed by a compiled backward: they have no gradient of their own."""

    @staticmethod
    def forward(ctx, *grads):  # noqa: ANN001, ANN002, ANN205
        return tuple(g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx, *_):  # noqa: ANN001, ANN002, ANN205
        raise DoubleBackwardError(
            "expected one backward through a compiled graph, got a second one (create_graph=True). "
            "Compiled graphs are differentiated once; for higher order use tessera.grad(tessera.grad(f)), or "
            "compile the function that computes the first gradient with tessera.grad inside."
        )


def bridge(forward: Callable, backward: Callable, plan: Bridge) -> Callable:
    """The forward as a differentiable function of its inputs."""
    results, tensors, numbers, pulled = plan.results, plan.tensors, plan.numbers, plan.pulled
    in_order = not numbers

    def restore(ctx: torch.autograd.function.FunctionCtx) -> list:
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        if in_order:
            return list(saved)
        merged: list = [None] * (len(tensors) + len(numbers))
        for position, t in zip(tensors, saved, strict=True):
            merged[position] = t
        for position, n in zip(numbers, ctx.numbers, strict=True):  # type: ignore[attr-defined]
            merged[position] = n
        return merged

    class TesseraGraph(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):  # noqa: ANN001, ANN002, ANN205
            with below_autograd():
                out = forward(*inputs)
            saved = out[results:]
            if in_order:
                ctx.save_for_backward(*saved)
            else:
                ctx.save_for_backward(*[saved[i] for i in tensors])
                ctx.numbers = [saved[i] for i in numbers]
            ctx.set_materialize_grads(False)
            ctx.kinds = [(x.stride(), x.shape, x.dtype, x.device) for x in [out[i] for i in pulled]]
            if plan.passive:
                ctx.mark_non_differentiable(*[out[i] for i in plan.passive if isinstance(out[i], torch.Tensor)])
            return out[:results]

        @staticmethod
        def backward(ctx, *cts):  # noqa: ANN001, ANN002, ANN205
            missing = [k for k, i in enumerate(pulled) if cts[i] is None]
            if len(missing) == len(pulled):
                return (None,) * plan.inputs
            given = zip((cts[i] for i in pulled), ctx.kinds, strict=True)
            seeds = [ct if ct is not None and ct.stride() == kind[0] else _laid_out(ct, *kind) for ct, kind in given]
            sources = (*seeds, *ctx.saved_tensors) if torch.is_grad_enabled() else None
            given = [*restore(ctx), *seeds]
            ctx.maybe_clear_saved_tensors()  # unless the graph is kept, the list is all that holds them now
            with below_autograd():
                grads = backward(given)
            if sources is not None:
                grads = _guard(grads, sources)
            aligned: list = [None] * plan.inputs
            for position, grad, reached in zip(plan.wrt, grads, plan.reached, strict=True):
                if not missing or not reached or any(k not in missing for k in reached):
                    aligned[position] = grad
            return tuple(aligned)

    set_code_exec_strategy(TesseraGraph.backward.__code__, _UNSEEN)
    return TesseraGraph.apply


def _laid_out(
    ct: torch.Tensor | None, stride: tuple[int, ...], shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A cotangent in the layout of the result it belongs to: the backward program was made for that layout. Where the
    result took no part in what is differentiated there is none, which is zero to the gradients of other results."""
    with torch.no_grad():
        if ct is None:
            ct = torch.zeros((), dtype=dtype, device=device).expand(shape)
        if overlaps_itself(ct.shape, stride):
            return ct.contiguous()
        return torch.empty_strided(ct.shape, stride, dtype=ct.dtype, device=ct.device).copy_(ct)


def _guard(grads: tuple, sources: tuple) -> tuple:
    """Under create_graph: gradients that depend on differentiable tensors say so, and refuse a second backward."""
    handle = next((x for x in sources if isinstance(x, torch.Tensor) and x.requires_grad), None)
    if handle is None:
        return grads
    live = [i for i, g in enumerate(grads) if g is not None]
    guarded = _Refuse.apply(*[grads[i].detach().requires_grad_(True) for i in live])
    out = list(grads)
    for i, g in zip(live, guarded, strict=True):
        out[i] = g
    return tuple(out)
