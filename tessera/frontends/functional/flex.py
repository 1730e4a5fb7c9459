"""`flex_attention`, as TorchDynamo's graphs have it, written as the equations it stands for.

In: queries, keys and values, and two functions over one score and its place (batch, head, row, column): one changes the
score, one says whether it counts. Out: equations over all scores at once, like any other attention's, so that
derivatives and fusion see them; the result, and the logarithms of the sums and the greatest scores, both to base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tessera.ir.record import Recorder
from tessera.torch_internals.higher_order import TensorIndices, flex_attention

_LN_2 = math.log(2)


@flex_attention.py_impl(Recorder)
def _flex_attention(
    mode: Recorder,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable,
    block_mask: Sequence,
    scale: float,
    kernel_options: dict,
    score_buffers: Sequence = (),
    mask_buffers: Sequence = (),
) -> tuple[torch.Tensor, ...]:
    with mode:
        heads = query.shape[1] // key.shape[1]
        key, value = (_repeated(x, query.shape[0], heads) for x in (key, value))
        working = torch.float64 if query.dtype == torch.float64 else torch.float32
        scores = query.to(working) @ key.to(working).mT * scale
        places = [torch.arange(n, device=query.device) for n in scores.shape]
        with TensorIndices():
            counts = _everywhere(block_mask[-1], (), mask_buffers)(*places, *mask_buffers)
            scores = _everywhere(score_mod, (0,), score_buffers)(scores, *places, *score_buffers)
        scores = scores.to(working).masked_fill(~counts, -math.inf)
        weights = torch.ops.aten._safe_softmax(scores, -1)
        out = weights.to(query.dtype) @ value.to(query.dtype)
        return out, scores.logsumexp(-1) / _LN_2, scores.amax(-1) / _LN_2


def _repeated(x: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    """Keys or values for every head of the queries, and every sequence."""
    x = x if heads == 1 else x.repeat_interleave(heads, 1)
    return x if x.shape[0] == batch else x.expand(batch, *x.shape[1:])


def _everywhere(fn: Callable, first: tuple[int, ...], buffers: Sequence) -> Callable:
    """A function of one place, over all of them: columns, then rows, heads and sequences."""
    for dim in reversed(range(4)):
        at = tuple(0 if d == dim else None for d in range(4))
        fn = torch.vmap(fn, in_dims=(*first, *at, *(None for _ in buffers)))
    return fn
