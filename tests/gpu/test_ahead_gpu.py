"""Kernels compiled in the background are the ones that calls use."""

from __future__ import annotations

import pytest
import torch

import tessera
from tessera.executors import tile
from tessera.tile.targets.triton.launch import Launcher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_finds_what_was_compiled(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    fast = tessera.jit(
        lambda x, m: torch.softmax(torch.where(m, x * 2, x), -1), executors=["tile", "aten"], strict=True
    )
    x = torch.randn(129, 777, device="cuda", dtype=dtype)
    mask = x > 0
    with tile.own_kernels() as made:
        got = fast(x, mask)
        torch.testing.assert_close(got, torch.softmax(torch.where(mask, x * 2, x), -1))
        launchers = [
            kernel.compiled for kernel in made.values() if kernel is not None and isinstance(kernel.compiled, Launcher)
        ]
    assert launchers
    for launcher in launchers:
        function = launcher.main.function
        (caches,) = function.device_caches.values()
        assert len(caches[0]) == 1  # compiled once, in the background, and found by the call
