"""Pools on a CUDA device: maxima as in eager bit for bit, averages and gradients as in float64, ours in a ResNet."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tessera

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WINDOWS = [  # kernel, stride, padding, dilation, return_indices, ceil_mode
    (3, 2, 1, 1, False, False),
    (2, 2, 0, 1, False, False),
    (3, 1, 1, 1, False, False),
    ((2, 3), (3, 2), (1, 0), (1, 2), False, True),
    (5, 3, 2, 1, False, True),
]


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("last", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_values_are_eagers_and_gradients_those_of_float64(dtype: torch.dtype, last: bool, windows: tuple) -> None:
    torch.manual_seed(0)
    x = torch.randint(-50, 50, (8, 24, 37, 41), device="cuda").to(dtype)
    x = torch.where(torch.rand(x.shape, device="cuda") < 0.01, torch.nan, x)
    x = x.to(memory_format=torch.channels_last) if last else x
    pool = nn.MaxPool2d(*windows)
    fast = tessera.jit(pool, strict=True)
    a, b, wide = (v.requires_grad_() for v in (x.clone(), x.clone(), x.double()))
    y, wanted = fast(a), pool(b)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)
    assert y.stride() == wanted.stride()
    g = torch.randn_like(wanted)
    y.backward(g)
    wanted.backward(g)
    pool(wide).backward(g.double())
    torch.testing.assert_close(a.grad, wide.grad.to(dtype), rtol=torch.finfo(dtype).eps * 4, atol=1e-6)  # type: ignore[union-attr]
    assert a.grad.stride() == b.grad.stride()  # type: ignore[union-attr]
    assert "tessera.max_pool_backward" in str(tessera.explain(fast))


AVERAGES = [  # kernel, stride, padding, ceil_mode, count_include_pad, divisor_override
    (3, 1, 1, False, False, None),
    (2, 2, 0, False, True, None),
    (3, 2, 1, True, True, None),
    ((2, 3), (3, 2), (1, 0), True, False, None),
    (5, 3, 2, False, True, 7),
]


@pytest.mark.parametrize("windows", AVERAGES, ids=str)
@pytest.mark.parametrize("last", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_averages_and_their_gradients_are_those_of_float64(dtype: torch.dtype, last: bool, windows: tuple) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 24, 37, 41, device="cuda").to(dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    pool = nn.AvgPool2d(*windows)
    fast = tessera.jit(pool, strict=True)
    # The exact gradient is computed over rows: where channels lie last and windows are padded, PyTorch's own kernel is
    # wrong on a GPU (2.11: the share of a window goes to elements that it does not cover).
    a, b, wide = (v.requires_grad_() for v in (x.clone(), x.clone(), x.double().contiguous()))
    y, wanted, exact = fast(a), pool(b), pool(wide)
    near = {"rtol": torch.finfo(dtype).eps * 4, "atol": 1e-5}
    torch.testing.assert_close(y, exact.to(dtype), **near)
    assert y.stride() == wanted.stride()
    g = torch.randn_like(wanted)
    for result, cotangent in ((y, g), (wanted, g), (exact, g.double())):
        result.backward(cotangent)
    torch.testing.assert_close(a.grad, wide.grad.to(dtype), **near)  # type: ignore[union-attr]
    assert a.grad.stride() == b.grad.stride()  # type: ignore[union-attr]
    assert "tessera.avg_pool_backward" in str(tessera.explain(fast))


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.after = nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 3, 2, 1)
        return F.relu(self.after(x) + x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stem_of_a_resnet(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    eager = Stem().to("cuda", dtype, memory_format=torch.channels_last)
    eager.norm.float()
    own, wide = copy.deepcopy(eager), copy.deepcopy(eager).double()
    fast = tessera.jit(own, strict=True)
    x = torch.randn(8, 3, 96, 96, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
    errors = []
    for _ in range(3):  # the first call compiles, the others take the short way to the device
        for model, call, images in ((wide, wide, x.double()), (eager, eager, x), (own, fast, x)):
            model.zero_grad()
            call(images).float().square().mean().backward()
    truth = [p.grad for p in wide.parameters()]
    for model in (eager, own):
        grads = [p.grad.double() for p in model.parameters()]  # type: ignore[union-attr]
        errors.append(sum((a - b).norm() ** 2 for a, b in zip(grads, truth, strict=True)) ** 0.5)  # type: ignore[operator]
    assert errors[1] <= 1.5 * errors[0] + 1e-5
    text = str(tessera.explain(fast))
    assert "tessera.max_pool_backward" in text and "aten.max_pool2d" not in text


def test_a_pool_of_more_than_two_to_the_31_elements() -> None:
    """Offsets into memory need 64 bits there."""
    x = torch.zeros(43, 64, 896, 896, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    x[-1, -1, -2:, -2:] = torch.tensor([[1.0, 3.0], [2.0, 3.0]], device="cuda")
    y = tessera.jit(lambda x: F.max_pool2d(x, 3, 2, 1), strict=True)(x)
    assert y[-1, -1, -1, -1] == 3 and y.float().sum() == 3
