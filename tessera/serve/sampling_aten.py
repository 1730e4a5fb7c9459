"""Choosing tokens by PyTorch's own operators: what a CPU does, and what the kernels of a GPU are compared with.

In: logits [rows, vocabulary], and temperature, seed and counter of every row, or none of the three where all rows take
the likeliest token; `cuts` are top_k, top_p and min_p. Out: what `sampling.choose` means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.util.philox import block

FEW = 1024  # tokens that are looked at first, where some are to be left out
Cuts = tuple[Tensor, Tensor, Tensor]


def choose(
    logits: Tensor, temperature: Tensor | None, seed: Tensor | None, counter: Tensor | None, cuts: Cuts | None = None
) -> Tensor:
    """A token for each row."""
    if temperature is None or seed is None or counter is None:
        best, token = logits.max(-1)
        return torch.where(torch.isfinite(best), token, -1)
    logits = cut(logits, temperature, cuts)
    best, token = logits.max(-1)
    token = torch.where(temperature > 0, _drawn(scaled(logits, temperature), _uniform(seed, counter)), token)
    return torch.where(torch.isfinite(best), token, -1)


def _drawn(left: Tensor, uniform: Tensor) -> Tensor:
    """Tokens drawn from what the settings leave, by where a random number falls among sums of probabilities."""
    sums = left.softmax(-1).cumsum(-1, dtype=torch.float64)  # in single precision, they would be off
    token = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True).clamp_(max=sums.shape[1] - 1)
    barred = left.gather(-1, token) == float("-inf")  # where sums are off by a rounding
    return torch.where(barred, left.argmax(-1, keepdim=True), token).squeeze(-1)


def _uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """A number in [0, 1) for each row, of 53 bits."""
    first, second, _, _ = block(seed, counter)
    return ((first << 21) ^ (second >> 11)).double() * 2.0**-53


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    return logits.float() / temperature.clamp(min=1e-6)[:, None]


def cut(logits: Tensor, temperature: Tensor, cuts: Cuts | None) -> Tensor:
    """-inf for tokens that the settings leave out, which is never the likeliest. A few of the likeliest tokens mostly
    say which; rows of which they do not are sorted whole."""
    if cuts is None:
        return logits
    top_k, top_p, min_p = cuts
    some = ((top_k > 0) | (top_p < 1) | (min_p > 0)).nonzero().squeeze(-1)
    for width in (FEW, logits.shape[1]):
        if len(some):
            left_out, certain = barred(logits[some], width, *(x[some] for x in (temperature, *cuts)))
            told, left_out, some = some[certain], left_out[certain], some[~certain]
            logits = logits.index_put((told,), logits[told].masked_fill(left_out, float("-inf")))
    return logits


def barred(
    logits: Tensor, width: int, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Which tokens top_k, top_p and min_p leave out; and of which rows the `width` likeliest tokens say so. Tokens as
    likely as the last of them are perhaps not all among them, so what is left must be above it."""
    order, tokens = _likeliest(logits, width)
    warmth, least = temperature.clamp(min=1e-6)[:, None], order[:, -1:]
    last = order.gather(-1, torch.where(top_k > 0, top_k, order.shape[1]).clamp(max=order.shape[1])[:, None] - 1)
    order = order.masked_fill(order < last, float("-inf"))
    weights, every = (_weights(x, order[:, :1], warmth) for x in (order, logits))
    shares = weights / torch.where(top_k[:, None] > 0, weights.sum(-1, True), every.sum(-1, True))
    out = (shares.cumsum(-1) - shares >= top_p[:, None]) & (top_p < 1)[:, None]
    out |= shares < min_p[:, None] * shares[:, :1]
    certain = torch.where(top_k[:, None] > 0, last > least, (out & (order > least)).any(-1, keepdim=True))
    certain |= (least == float("-inf")) | (order.shape == logits.shape)
    out |= order == float("-inf")
    out[:, 0] = False
    return torch.ones_like(logits, dtype=torch.bool).scatter_(1, tokens, out), certain.squeeze(-1)


def _likeliest(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """So many tokens by their logits; of equal ones the first comes first."""
    if width >= logits.shape[1]:
        return torch.sort(logits, descending=True, stable=True)
    tokens = logits.topk(width, dim=-1, sorted=False).indices.sort(-1).values
    order, places = torch.sort(logits.gather(-1, tokens), descending=True, stable=True)
    return order, tokens.gather(-1, places)


def _weights(logits: Tensor, top: Tensor, warmth: Tensor) -> Tensor:
    """How likely tokens are beside the likeliest: of two equal ones each has exactly a half."""
    return ((logits.double() - top.double()) / warmth).exp()
