"""ai.onnx.ml: linear models and support vectors."""

from __future__ import annotations

import math

import numpy as np
import torch

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.registry import ML, operator
from tessera.frontends.onnx.values import Untraceable, is_known, literal

Tensor = torch.Tensor


def transformed(scores: Tensor, kind: str) -> Tensor:
    """What a model does to its scores at the end."""
    match kind:
        case "NONE":
            return scores
        case "LOGISTIC":
            return torch.sigmoid(scores)
        case "SOFTMAX":
            return torch.softmax(scores, -1)
        case "SOFTMAX_ZERO":
            nonzero = scores != 0
            return torch.where(nonzero, torch.softmax(torch.where(nonzero, scores, -math.inf), -1), 0.0)
        case "PROBIT":
            return math.sqrt(2) * torch.erfinv(2 * scores - 1)
    raise OnnxError(f"post_transform: unknown {kind!r}")


def labelled(places: Tensor, ints: list[int] | None, strings: list[str] | None) -> object:
    """Classes by their names."""
    if strings is None:
        return literal(ints or [], torch.int64).to(places.device)[places]
    if not is_known(places):
        raise Untraceable("strings are Python values, which no program holds")
    out = np.empty(places.shape, dtype=object)
    out[...] = np.array(strings, dtype=object)[places.numpy()]
    return out


def _table(values: list[float], rows: int, x: Tensor) -> Tensor:
    if not rows or len(values) % rows:
        raise OnnxError(f"expected {rows} rows of equal length, got {len(values)} numbers")
    return literal(values, torch.float32).reshape(rows, -1).to(x.device)


@operator("LinearRegressor", domain=ML)
def linear_regressor(
    x: Tensor,
    *,
    coefficients: list[float],
    intercepts: list[float] | None = None,
    post_transform: str = "NONE",
    targets: int = 1,
) -> Tensor:
    scores = x.float() @ _table(coefficients, targets, x).t()
    if intercepts:
        scores = scores + literal(intercepts, torch.float32).to(x.device)
    return transformed(scores, post_transform)


@operator("LinearClassifier", domain=ML)
def linear_classifier(
    x: Tensor,
    *,
    coefficients: list[float],
    intercepts: list[float] | None = None,
    classlabels_ints: list[int] | None = None,
    classlabels_strings: list[str] | None = None,
    multi_class: int = 0,
    post_transform: str = "NONE",
) -> tuple[object, Tensor]:
    names = classlabels_strings or classlabels_ints or []
    rows = len(intercepts) if intercepts else len(names)
    scores = x.float().reshape(-1, x.shape[-1]) @ _table(coefficients, rows, x).t()
    if intercepts:
        scores = scores + literal(intercepts, torch.float32).to(x.device)
    if scores.shape[1] == 1 and len(names) == 2:  # one score tells both
        places = (scores[:, 0] > (0.5 if post_transform == "LOGISTIC" else 0)).to(torch.int64)
        if post_transform == "LOGISTIC":
            positive = torch.sigmoid(scores)
            places, both = (positive[:, 0] > 0.5).to(torch.int64), torch.cat([1 - positive, positive], 1)
        else:
            both = torch.cat([-scores, scores], 1)
            both = transformed(both, post_transform)
        return labelled(places, classlabels_ints, classlabels_strings), both
    return labelled(scores.argmax(1), classlabels_ints, classlabels_strings), transformed(scores, post_transform)


def _kernel(x: Tensor, vectors: Tensor, kind: str, params: list[float] | None) -> Tensor:
    gamma, coef, degree = params or (0.0, 0.0, 3.0)
    match kind:
        case "LINEAR":
            return x @ vectors.t()
        case "POLY":
            return (gamma * (x @ vectors.t()) + coef) ** degree
        case "RBF":
            return torch.exp(-gamma * (x.unsqueeze(1) - vectors).square().sum(-1))
        case "SIGMOID":
            return torch.tanh(gamma * (x @ vectors.t()) + coef)
    raise OnnxError(f"kernel_type: unknown {kind!r}")


@operator("SVMRegressor", domain=ML)
def svm_regressor(
    x: Tensor,
    *,
    coefficients: list[float],
    kernel_params: list[float] | None = None,
    kernel_type: str = "LINEAR",
    n_supports: int = 0,
    one_class: int = 0,
    post_transform: str = "NONE",
    rho: list[float],
    support_vectors: list[float] | None = None,
) -> Tensor:
    wide = x.float()
    weights = literal(coefficients, torch.float32).to(x.device)
    if n_supports:
        kernel = _kernel(wide, _table(support_vectors or [], n_supports, x), kernel_type, kernel_params)
        scores = (kernel @ weights).unsqueeze(1)
    else:
        scores = (wide @ weights).unsqueeze(1)
    scores = scores + rho[0]
    return torch.where(scores > 0, 1.0, -1.0) if one_class else transformed(scores, post_transform)


@operator("SVMClassifier", domain=ML)
def svm_classifier(
    x: Tensor,
    *,
    classlabels_ints: list[int] | None = None,
    classlabels_strings: list[str] | None = None,
    coefficients: list[float],
    kernel_params: list[float] | None = None,
    kernel_type: str = "LINEAR",
    post_transform: str = "NONE",
    prob_a: list[float] | None = None,
    prob_b: list[float] | None = None,
    rho: list[float],
    support_vectors: list[float] | None = None,
    vectors_per_class: list[int] | None = None,
) -> tuple[object, Tensor]:
    """A vote between every two classes; without support vectors, one score a class."""
    names = classlabels_strings or classlabels_ints or []
    wide = x.float().reshape(-1, x.shape[-1])
    if not vectors_per_class:
        scores = wide @ _table(coefficients, len(names), x).t() + rho[0]
        return labelled(scores.argmax(1), classlabels_ints, classlabels_strings), transformed(scores, post_transform)
    if prob_a:
        raise OnnxError("SVMClassifier: probabilities from pairs (prob_a) are not defined by the standard's text")
    counts = vectors_per_class
    starts = [sum(counts[:i]) for i in range(len(counts))]
    kernel = _kernel(wide, _table(support_vectors or [], sum(counts), x), kernel_type, kernel_params)
    alphas = _table(coefficients, len(counts) - 1, x)
    votes, margins, pair = [torch.zeros(len(wide), device=x.device) for _ in counts], [], 0
    for i in range(len(counts)):
        for j in range(i + 1, len(counts)):
            first, second = slice(starts[i], starts[i] + counts[i]), slice(starts[j], starts[j] + counts[j])
            margin = kernel[:, first] @ alphas[j - 1, first] + kernel[:, second] @ alphas[i, second] + rho[pair]
            votes[i] = votes[i] + (margin > 0)
            votes[j] = votes[j] + (margin <= 0)
            margins.append(margin)
            pair += 1
    places = torch.stack(votes, 1).argmax(1)
    scores = torch.stack(margins, 1)
    if len(counts) == 2:
        scores = torch.cat([scores, -scores], 1)
    return labelled(places, classlabels_ints, classlabels_strings), transformed(scores, post_transform)
