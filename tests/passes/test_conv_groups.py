"""A convolution for each group: eager's numbers and layouts, and only where a library gains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import tessera
from tessera.passes.patterns import conv_groups

SPLIT = {
    "two groups": lambda: nn.Conv2d(32, 64, 3, padding=1, groups=2),
    "four, strided": lambda: nn.Conv2d(64, 64, 5, stride=2, groups=4, bias=False),
    "same": lambda: nn.Conv2d(32, 32, 3, padding="same", dilation=2, groups=2),
}
WHOLE = {
    "one group": lambda: nn.Conv2d(32, 32, 3),
    "narrow": lambda: nn.Conv2d(16, 16, 3, groups=4),
    "many": lambda: nn.Conv2d(256, 256, 3, groups=16),
    "depthwise": lambda: nn.Conv2d(32, 32, 3, groups=32),
    "1 x 1, strided": lambda: nn.Conv2d(32, 32, 1, stride=2, groups=2),
    "1 x 1, padded": lambda: nn.Conv2d(32, 32, 1, padding=1, groups=2),
    "1 x 1, depthwise": lambda: nn.Conv2d(32, 32, 1, groups=32),
    "transposed": lambda: nn.ConvTranspose2d(32, 32, 3, groups=2),
}


@pytest.fixture(autouse=True)
def here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_groups, "without_groups", lambda: True)
    torch._dynamo.reset()


def convolutions(fast: Callable) -> int:
    final = tessera.stages(fast)[-1].trace
    return sum(eqn.opname in ("conv2d", "convolution", "conv_transpose2d") for eqn in final.equations)


@pytest.mark.parametrize("name", [*SPLIT, *WHOLE])
def test_without_gradients(name: str) -> None:
    layer = (SPLIT | WHOLE)[name]()
    x = torch.randn(2, layer.in_channels, 9, 8)
    fast = tessera.jit(layer, executors=["tile", "aten"], strict=True)
    with torch.no_grad():
        got, want = fast(x), layer(x)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
    assert convolutions(fast) == (layer.groups if name in SPLIT else 1)


@pytest.mark.parametrize(("batch", "bias", "arm"), [(1, False, True), (3, True, True), (1, True, False)])
def test_single_pixels_are_one_product(batch: int, bias: bool, arm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_groups, "without_groups", lambda: arm)
    net = nn.Sequential(nn.Conv2d(24, 12, 1, groups=4, bias=bias), nn.ReLU(), nn.Conv2d(12, 30, 1, groups=6, bias=bias))
    x = torch.randn(batch, 24, 5, 7)
    fast = tessera.jit(net, executors=["tile", "aten"], strict=True)
    with torch.no_grad():
        got, want = fast(x), net(x)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
    names = [eqn.opname for eqn in tessera.stages(fast)[-1].trace.equations]
    assert names.count("bmm") == 2 and not convolutions(fast)


def test_wider_ones_are_left_to_a_library_that_knows_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_groups, "without_groups", lambda: False)
    layer, x = SPLIT["two groups"](), torch.randn(2, 32, 6, 6)
    fast = tessera.jit(layer, executors=["tile", "aten"], strict=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), layer(x))
    assert convolutions(fast) == 1


def test_channels_side_by_side() -> None:
    net = nn.Sequential(*(nn.Conv2d(32, 32, 3, padding=1, groups=2) for _ in range(3)))
    x = torch.randn(2, 32, 6, 6).to(memory_format=torch.channels_last)
    with torch.no_grad():
        got, want = tessera.jit(net, executors=["tile", "aten"], strict=True)(x), net(x)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()


def test_gradients_leave_it_whole() -> None:
    layer = SPLIT["two groups"]()
    x = torch.randn(2, 32, 6, 6, requires_grad=True)
    fast = tessera.jit(layer, executors=["tile", "aten"], strict=True)
    got, want = (torch.autograd.grad(fn(x).square().sum(), (x, *layer.parameters())) for fn in (fast, layer))
    torch.testing.assert_close(got, want)
