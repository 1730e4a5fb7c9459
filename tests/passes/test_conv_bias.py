"""The bias of a convolution as a sum of its own: eager's numbers and layouts, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tessera
from tessera.passes.patterns import conv_bias

LAYERS = {
    "conv1d": lambda: nn.Conv1d(3, 4, 3, padding=1),
    "conv2d": lambda: nn.Conv2d(3, 4, 3, stride=2),
    "same": lambda: nn.Conv2d(3, 4, 3, padding="same"),
    "conv3d": lambda: nn.Conv3d(3, 4, 2),
    "transposed": lambda: nn.ConvTranspose2d(3, 4, 3, stride=2),
    "grouped": lambda: nn.Conv2d(6, 4, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
}


@pytest.fixture(autouse=True)
def here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_bias, "DEVICES", ("cpu",))
    torch._dynamo.reset()


def image(layer: nn.Module, batch: tuple[int, ...] = (2,)) -> Tensor:
    return torch.randn(*batch, layer.in_channels, *[7] * len(layer.kernel_size))  # type: ignore[arg-type]


def biases(fast: Callable, stage: str) -> list[bool]:
    """Of every convolution, whether it has a bias."""
    traces = [s.trace for s in tessera.stages(fast) if s.name.endswith(stage)]
    convolutions = [eqn for eqn in traces[0].equations if eqn.opname in conv_bias.CONVOLUTIONS]
    return [len(eqn.args) > 2 and eqn.args[2] is not None for eqn in convolutions]


@pytest.mark.parametrize("name", LAYERS)
def test_gradients(name: str) -> None:
    layer = LAYERS[name]()
    x = image(layer).requires_grad_()
    fast = tessera.jit(layer, executors=["tile", "aten"], strict=True)
    outs = [fn(x) for fn in (fast, layer)]
    grads = [torch.autograd.grad(y.sin().sum(), (x, *layer.parameters())) for y in outs]
    for got, want in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
    assert biases(fast, "dce" if name == "depthwise" else "conv_bias") == [name == "depthwise"]


def test_an_image_without_a_batch() -> None:
    layer = nn.Conv2d(3, 4, 3)
    x = image(layer, ())
    with torch.no_grad():
        torch.testing.assert_close(tessera.jit(layer, executors=["tile", "aten"], strict=True)(x), layer(x))


def test_channels_side_by_side() -> None:
    layer = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = image(layer).to(memory_format=torch.channels_last)
    with torch.no_grad():
        got, want = tessera.jit(layer, executors=["tile", "aten"], strict=True)(x), layer(x)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
