"""The CUDA runtime, below `torch.cuda`'s own checks."""

from __future__ import annotations

from collections.abc import Callable

from tessera.torch_internals.lookup import symbol

# None in a build without CUDA.
current_device: Callable[[], int] | None = symbol(
    "torch._C._cuda_getDevice", "launching kernels", cuda=True, otherwise=None
)
# Keeps the device busy for so many cycles.
sleep: Callable[[int], None] = symbol("torch.cuda._sleep", "timing kernels without the host's part")
