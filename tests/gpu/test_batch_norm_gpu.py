"""Batch norm in training on a CUDA device, held against eager: results, gradients, running statistics, launches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tessera
from tessera.tools.networks import ResNet50

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def small(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = ResNet50((1, 1), 16, 10).to("cuda", dtype, memory_format=torch.channels_last).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    return model


def distance(a: nn.Module, b: nn.Module) -> float:
    """The error of all gradients together, relative to their size."""
    pairs = [(p.grad.double(), q.grad.double()) for p, q in zip(a.parameters(), b.parameters(), strict=True)]  # type: ignore[union-attr]
    return float(sum((p - q).norm() ** 2 for p, q in pairs) / sum(q.norm() ** 2 for _, q in pairs)) ** 0.5


@pytest.mark.parametrize("last", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_resnet_learns_as_in_eager(dtype: torch.dtype, last: bool) -> None:
    eager = small(dtype)
    own, wide = copy.deepcopy(eager), copy.deepcopy(eager).double()
    fast = tessera.jit(own, strict=True)
    images = torch.randn(16, 3, 96, 96, device="cuda", dtype=dtype)
    images = images.to(memory_format=torch.channels_last) if last else images
    labels = torch.randint(0, 10, (16,), device="cuda")
    for _ in range(3):  # the first call compiles, the others take the short way to the device
        for model, call, x in ((eager, eager, images), (own, fast, images), (wide, wide, images.double())):
            model.zero_grad()
            call(x, labels).backward()
    assert distance(own, wide) <= 1.5 * distance(eager, wide) + 1e-5
    for a, b in zip(own.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-3)
    assert all(m.num_batches_tracked == 3 for m in own.modules() if isinstance(m, nn.BatchNorm2d))


def test_a_large_mean_costs_no_digits() -> None:
    norm = nn.BatchNorm2d(64).cuda()
    wide = copy.deepcopy(norm).double()
    x = (torch.randn(64, 64, 56, 56, device="cuda") + 3000).to(memory_format=torch.channels_last)
    fast = tessera.jit(norm, strict=True)
    torch.testing.assert_close(fast(x), wide(x.double()).float(), rtol=0, atol=2e-3)
    torch.testing.assert_close(norm.running_var, wide.running_var.float(), rtol=1e-5, atol=0)


def test_addresses_that_are_not_aligned_and_other_streams() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * w).sin() + x.var(0)

    fast = tessera.jit(f, strict=True)
    memory, w = torch.randn(4097, 64, device="cuda").flatten(), torch.randn(64, device="cuda")
    for start in (0, 0, 1, 64, 0):
        x = memory[start : start + 4096 * 64].view(4096, 64)
        torch.testing.assert_close(fast(x, w), f(x, w), rtol=1e-4, atol=1e-4)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        got = fast(x, w)
    torch.cuda.current_stream().wait_stream(beside)
    torch.testing.assert_close(got, f(x, w), rtol=1e-4, atol=1e-4)
