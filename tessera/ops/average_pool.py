"""The gradient of average pooling, from the sizes of what was pooled.

    avg_pool_backward  every element gets its share of each window that covers it

PyTorch's operator takes what was pooled and looks at its sizes and its layout alone; saved for backward, that is memory
nobody reads. This one takes the two. `passes/decompose/pool` puts it where kernels compute it; here stands what it
computes, in PyTorch. Spatial dimensions are the last ones, as many as `kernel` has: two or three.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.ops.families import per_element
from tessera.ops.op import declare
from tessera.ops.pool import Sizes, gradient

library = torch.library.Library("tessera", "FRAGMENT")
library.define(
    "avg_pool_backward(Tensor grad, SymInt[] size, int[] kernel, int[] stride, int[] padding, bool ceil_mode, "
    "bool count_include_pad, int? divisor, bool channels_last) -> Tensor"
)
aten = torch.ops.aten
UNROLLED = (
    25  # elements of a window that kernels read one by one; larger windows are few, and the library shares them out
)
BACKWARD = {2: aten.avg_pool2d_backward.default, 3: aten.avg_pool3d_backward.default}


def _check(kernel: Sizes, stride: Sizes, padding: Sizes) -> None:
    if len(kernel) not in BACKWARD or len(stride) != len(kernel) or len(padding) != len(kernel):
        got = f"{list(kernel)}, {list(stride)}, {list(padding)}"
        raise ValueError(f"tessera::avg_pool_backward: expected 2 or 3 numbers each, got {got}")


def _backward(
    grad: Tensor,
    size: Sizes,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
    channels_last: bool,
) -> Tensor:
    _check(kernel, stride, padding)
    pooled = gradient(grad, size, channels_last)
    # Only sizes and layout of what was pooled are looked at. Where channels lie last, the library's kernel for GPUs
    # forgets the padding (seen in 2.11).
    rows = grad.is_cuda and channels_last and any(padding)
    like = gradient(grad, size, False) if rows else pooled
    given = BACKWARD[len(kernel)](grad, like, kernel, stride, padding, ceil_mode, count_include_pad, divisor)
    return pooled.copy_(given)


def _empty(
    grad: Tensor,
    size: Sizes,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
    channels_last: bool,
) -> Tensor:
    _check(kernel, stride, padding)
    return gradient(grad, size, channels_last)


library.impl("avg_pool_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("tessera::avg_pool_backward", _empty, lib=library)
avg_pool_backward = torch.ops.tessera.avg_pool_backward.default
declare("tessera.avg_pool_backward", "pool", cost=per_element(4))
