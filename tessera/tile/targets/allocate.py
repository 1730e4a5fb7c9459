"""Memory as TorchInductor's programs allocate it: half the cost of `torch.empty_strided`, whose arguments are parsed.

Each takes a shape, strides and a dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

empty_cpu: Callable[..., torch.Tensor] = torch._C._dynamo.guards._empty_strided_cpu
empty_cuda: Callable[..., torch.Tensor] = torch._C._dynamo.guards._empty_strided_cuda  # on the current device
