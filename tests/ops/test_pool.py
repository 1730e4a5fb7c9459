"""Max pooling with offsets, as PyTorch computes it: the same values and gradients as PyTorch's own max pools."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import tessera  # noqa: F401  (registers the operators)
from tessera.ops.pool import FORMATS

ops = torch.ops.tessera
POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
WINDOWS = [
    ([3], [2], [1], [1]),
    ([4], [1], [2], [2]),
    ([3, 3], [2, 2], [1, 1], [1, 1]),
    ([2, 3], [1, 3], [0, 1], [1, 2]),
    ([1, 4], [2, 1], [0, 2], [3, 1]),
    ([3, 2, 2], [2, 1, 2], [1, 1, 0], [1, 1, 2]),
]


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_values_and_gradients_are_pytorchs(windows: tuple, ceil_mode: bool) -> None:
    n = len(windows[0])
    for dtype, last, batched in itertools.product((torch.float32, torch.bfloat16), (False, True), (False, True)):
        if last and (n == 1 or not batched):
            continue
        torch.manual_seed(n)
        x = torch.randint(-3, 4, ([2] if batched else []) + [3, 9, 10, 11][: n + 1]).to(dtype)
        x = torch.where(torch.rand(x.shape) < 0.05, torch.nan, x)
        x = (x.to(memory_format=FORMATS[x.ndim]) if last else x).requires_grad_()
        y = POOLS[n](x, *windows, ceil_mode)
        values, offsets = ops.max_pool(x.detach(), *windows, ceil_mode)
        assert torch.equal(values.nan_to_num(9), y.nan_to_num(9)) and values.stride() == y.stride() == offsets.stride()
        g = torch.randn_like(y)
        (wanted,) = torch.autograd.grad(y, x, g)
        dx = ops.max_pool_backward(g, offsets, list(x.shape), *windows, last)
        assert torch.equal(dx, wanted) and (n == 1 or dx.stride() == wanted.stride())


def test_the_first_of_equal_elements_and_the_last_nan() -> None:
    x = torch.tensor([[1.0, 2, 2, 0], [torch.nan, 0, torch.nan, 1], [-torch.inf] * 4]).unsqueeze(1)
    _, offsets = ops.max_pool(x, [4], [4], [0], [1], False)
    assert offsets.flatten().tolist() == [1, 2, 0]


def test_fakes_know_its_types() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for shape, last in itertools.product(((2, 4, 9, 9), (4, 9, 9)), (False, True)):
        x = torch.randn(shape)
        x = x.to(memory_format=torch.channels_last) if last and x.ndim == 4 else x
        real = ops.max_pool(x, [3, 3], [2, 2], [1, 1], [1, 1], False)
        real = (*real, ops.max_pool_backward(*real, list(shape), [3, 3], [2, 2], [1, 1], [1, 1], last and x.ndim == 4))
        with FakeTensorMode() as mode:
            f = mode.from_tensor(x)
            made = ops.max_pool(f, [3, 3], [2, 2], [1, 1], [1, 1], False)
            made = (
                *made,
                ops.max_pool_backward(*made, list(shape), [3, 3], [2, 2], [1, 1], [1, 1], last and x.ndim == 4),
            )
        for a, b in zip(made, real, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_windows_that_it_cannot_count_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 127 elements"):
        ops.max_pool(torch.randn(1, 1, 20, 20), [12, 12], [1, 1], [0, 0], [1, 1], False)
    with pytest.raises(ValueError, match="1 to 3 numbers each"):
        ops.max_pool(torch.randn(1, 1, 20, 20), [2, 2], [1], [0, 0], [1, 1], False)
