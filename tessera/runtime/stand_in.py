"""Inputs that gradients depend on and that nothing saves, such as the x of a tanh, which saves its result.

A gradient that is differentiated again must lead back to them. Keeping them would keep their memory too, in every
training step, so a stand-in is kept: a further result of the graph, of the input's shape but without contents, whose
gradient is passed on to the input. Leaves need none, since their nodes in autograd's graph hold them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Context = torch.autograd.function.FunctionCtx


def make(ctx: Context, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Stand-ins for those of the inputs that are no leaves; `results` are those that get a cotangent."""
    ctx.stood_for = [i for i, x in enumerate(inputs) if not x.is_leaf]  # type: ignore[attr-defined]
    if ctx.stood_for:  # type: ignore[attr-defined]
        # Cotangents of stand-ins are seldom there, and would otherwise be zeros in memory.
        ctx.set_materialize_grads(False)
        ctx.results = [(y.shape, y.dtype, y.device) for y in results]  # type: ignore[attr-defined]
    return [_without_contents(inputs[i]) for i in ctx.stood_for]  # type: ignore[attr-defined]


def _without_contents(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, [0] * x.ndim, dtype=x.dtype, device=x.device)


def arrive(
    ctx: Context, seeds: list, passed: Sequence[torch.Tensor | None], aligned: list, inputs: Sequence[int]
) -> bool:
    """Put what reached the stand-ins among the gradients; fill the seeds. False where nothing reached the results."""
    for place, ct in zip(ctx.stood_for, passed, strict=True):  # type: ignore[attr-defined]
        aligned[inputs[place]] = ct
    if not ctx.stood_for:  # type: ignore[attr-defined]
        return True
    if all(ct is None for ct in seeds):
        return False
    for i, (shape, dtype, device) in enumerate(ctx.results):  # type: ignore[attr-defined]
        if seeds[i] is None:
            seeds[i] = torch.zeros(shape, dtype=dtype, device=device)
    return True
