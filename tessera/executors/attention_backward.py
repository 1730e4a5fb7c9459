"""The library's attention gradients, called so that no layout is mistaken.

In: the operators of PyTorch's cuDNN and memory-efficient attention backward. Out: callables of the same meaning that
hold whatever came before them in the process. Both kernels read tensors by strides that they never check:

- PyTorch keeps cuDNN's plans by the sizes and strides of q, k and v (and by mask, dropout and causality), but a plan
  also fixes the strides of the output and of its gradient. A second caller whose gradient lies otherwise gets noise.
- The memory-efficient kernel takes the output for [B, T, H, D] in memory, as its forward gives it.

So the output is handed over as the forward laid it out, its gradient always as [B, T, H, D], and cuDNN's plans are kept
apart from those that eager code asks for: a dropout of -0.0 is none, but is another key.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from tessera.ir.strides import with_strides
from tessera.ir.types import contiguous_strides
from tessera.torch_internals.operators import OpOverload, raw_callable

BY_TOKEN = (0, 2, 1, 3)  # [B, H, T, D] with T before H in memory: what a projection after attention gives back


def laid_out(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """`x` with its dimensions dense in memory in this order; itself where it is so already."""
    return with_strides(x, contiguous_strides(x.shape, order))  # type: ignore[arg-type]


def order_of(x: Tensor) -> tuple[int, ...]:
    """Dimensions from the widest stride to the narrowest: cuDNN's output lies as its query does."""
    return tuple(sorted(range(x.ndim), key=lambda d: -x.stride(d)))


@functools.cache
def own_plan(dropout: float) -> float:
    """The same dropout, under a key of our own: -0.0, or the next float32."""
    if dropout == 0:
        return -0.0
    (bits,) = struct.unpack("<i", struct.pack("<f", dropout))
    after = struct.unpack("<f", struct.pack("<i", bits + 1))[0]
    return after if after < 1 else math.nextafter(dropout, 0.0)


def _cudnn_backward(op: Callable) -> Callable:
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: object, **kwargs: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        *noted, dropout, causal = rest
        grad, out = laid_out(grad, BY_TOKEN), laid_out(out, order_of(q))
        return op(grad, q, k, v, out, *noted, own_plan(dropout), causal, **kwargs)  # type: ignore[arg-type]

    return backward


def _efficient_backward(op: Callable) -> Callable:
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, *rest: object, **kwargs: object
    ) -> tuple[Tensor, ...]:
        return op(grad, q, k, v, bias, laid_out(out, BY_TOKEN), *rest, **kwargs)

    return backward


_ADAPTED: dict[OpOverload, Callable[[Callable], Callable]] = {
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}


def adapted(op: OpOverload) -> Callable | None:
    """The callable that stands for one of these operators; None for any other."""
    adapt = _ADAPTED.get(op)
    return None if adapt is None else adapt(raw_callable(op))
