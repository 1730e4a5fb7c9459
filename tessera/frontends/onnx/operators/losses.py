"""Losses."""

from __future__ import annotations

import torch

from tessera.frontends.onnx.registry import operator

Tensor = torch.Tensor


def _nll(scores: Tensor, target: Tensor, weight: Tensor | None, ignore: int | None, reduction: str) -> Tensor:
    """Minus the log-probability of the right class, of each example or over all."""
    target = target.to(torch.int64)
    kept = torch.ones_like(target, dtype=torch.bool) if ignore is None else target != ignore
    places = torch.where(kept, target, 0)
    places = torch.where(places < 0, places + scores.shape[1], places)
    loss = -scores.gather(1, places.unsqueeze(1)).squeeze(1)
    each = torch.ones_like(loss) if weight is None else weight[places]
    each = torch.where(kept, each, 0.0)
    loss = loss * each
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / each.sum()


@operator("NegativeLogLikelihoodLoss", 12)
def negative_log_likelihood_loss(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int | None = None, reduction: str = "mean"
) -> Tensor:
    return _nll(x, target, weight, ignore_index, reduction)


@operator("SoftmaxCrossEntropyLoss", 12)
def softmax_cross_entropy_loss(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int | None = None, reduction: str = "mean"
) -> tuple[Tensor, Tensor]:
    scores = torch.log_softmax(x, 1)
    return _nll(scores, target, weight, ignore_index, reduction), scores
