"""Inputs that gradients depend on and that nothing saves, such as the x of a tanh, which saves its result.

A gradient that is differentiated again must lead back to them. Keeping them would keep their memory too, in every
training step, so a stand-in is kept: a further result of the graph, of the input's shape but without contents, whose
gradient is passed on to the input. Leaves need none, since their nodes in autograd's graph hold them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Context = torch.autograd.function.FunctionCtx


def make(ctx: Context, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Stand-ins for those of the inputs that are no leaves."""
    ctx.stood_for = [i for i, x in enumerate(inputs) if not x.is_leaf]  # type: ignore[attr-defined]
    return [_without_contents(inputs[i]) for i in ctx.stood_for]  # type: ignore[attr-defined]


def _without_contents(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, [0] * x.ndim, dtype=x.dtype, device=x.device)


def arrive(ctx: Context, passed: Sequence[torch.Tensor | None], aligned: list, inputs: Sequence[int]) -> None:
    """Put what reached the stand-ins among the gradients."""
    for place, ct in zip(ctx.stood_for, passed, strict=True):  # type: ignore[attr-defined]
        aligned[inputs[place]] = ct
