"""Inputs that gradients depend on and that nothing saves, such as the x of a tanh, which saves its result.

A gradient that is differentiated again must lead back to them. Keeping them would keep their memory too, in every
training step, so a proxy is saved: a further result of the graph, of the input's shape but without contents, whose
gradient is passed on to the input. Leaves need none, since their nodes in autograd's graph hold them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Context = torch.autograd.function.FunctionCtx


def make_proxies(ctx: Context, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Proxies of those of the inputs that are no leaves."""
    ctx.proxied = [i for i, x in enumerate(inputs) if not x.is_leaf]  # type: ignore[attr-defined]
    return [_without_contents(inputs[i]) for i in ctx.proxied]  # type: ignore[attr-defined]


def _without_contents(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, [0] * x.ndim, dtype=x.dtype, device=x.device)


def pass_on(ctx: Context, cts: Sequence[torch.Tensor | None], aligned: list, unsaved: Sequence[int]) -> None:
    """Put the cotangents of the proxies among the gradients of the inputs."""
    for place, ct in zip(ctx.proxied, cts, strict=True):  # type: ignore[attr-defined]
        aligned[unsaved[place]] = ct
