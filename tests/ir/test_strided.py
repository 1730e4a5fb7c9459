"""as_strided addresses memory: reads and writes through it, their derivatives and batching, in every layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import WAYS, assert_like_eager
from torch import Tensor, no_grad
from torch.autograd import functional
from torch.testing import assert_close

import tessera
from tessera.util.errors import CaptureError


def inputs() -> list:
    torch.manual_seed(0)
    return [torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)]


def changed(y: Tensor, write: Callable[[Tensor], object], *others: Tensor) -> tuple[Tensor, ...]:
    write(y)
    return (y * y, *others)


def in_channels(x: Tensor) -> Tensor:
    """Laid out as channels_last."""
    return x.view(1, 3, 2, 2).contiguous(memory_format=torch.channels_last) * 1.5


def beyond(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    v = y[1:]
    v.as_strided((2,), (1,), 0).mul_(2)  # in front of what the view shows
    u = y[:2, 1]
    u.as_strided((2, 3), (4, 1)).mul_(w[:2, :3])  # beside it
    return y * y, v, u


def read_after_write(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    v = y.as_strided((2, 2), (4, 1))
    y.mul_(w[:3])
    return v * 2, y


def of_strided(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    v = y.as_strided((3, 3), (4, 1))
    v.as_strided((2, 2), (3, 1), 1).mul_(2)
    return y * y, v * 1


def under_no_grad(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x * w[:3]
    with no_grad():
        y.as_strided((2, 2), (4, 1), 1).mul_(5)
    y.detach().fill_diagonal_(3.0)
    return y * y


def complex_parts(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    z = torch.complex(x, x * 2)
    torch.view_as_real(z).as_strided((3,), (2,), 1).mul_(2)
    return z.abs()


def of_input(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    b.as_strided((2, 2), (4, 1), 1).mul_(5)
    return b * x, x.as_strided((3, 2), (4, 2), 1) * 3, x.as_strided((2, 2), (1, 1))


PROGRAMS: dict[str, Callable] = {
    "fill_diagonal": lambda x, w, b: changed(w * 2, lambda y: y.fill_diagonal_(0)),
    "fill_diagonal of tall": lambda x, w, b: changed(torch.cat([w, w, x]), lambda y: y.fill_diagonal_(0, wrap=True)),
    "fill_diagonal of transposed": lambda x, w, b: changed((w * 2).t(), lambda y: y.fill_diagonal_(0)),
    "fill_diagonal of a cube": lambda x, w, b: changed(w.expand(4, 4, 4) * 1, lambda y: y.fill_diagonal_(3.0)),
    "write": lambda x, w, b: changed(x * 2, lambda y: y.as_strided((2, 2), (4, 1), 1).mul_(w[:2, :2])),
    "write in channels_last": lambda x, w, b: changed(in_channels(x), lambda y: y.as_strided((4,), (3,), 1).mul_(7)),
    "read": lambda x, w, b: (x * 2).as_strided((3, 2), (4, 2), 1) * 3,
    "read windows": lambda x, w, b: x.sin().as_strided((5, 4), (2, 1)).exp(),
    "read transposed": lambda x, w, b: (x * 2).t().clone().as_strided((3, 2), (4, 2), 1) * 3,
    "read channels_last": lambda x, w, b: in_channels(x).as_strided((4, 3), (3, 1)) * b.view(4, 3),
    "read expanded": lambda x, w, b: (x[0] * 2).expand(3, 4).as_strided((2, 4), (0, 1)) * w[:2],
    "a cotangent with other strides": lambda x, w, b: (x * 2).as_strided((3, 4), (4, 1)).t().mul(b.t()).sum(0),
    "an expanded cotangent": lambda x, w, b: changed(x * 2, lambda y: y.as_strided((2, 2), (4, 1)).mul_(3))[0].sum(),
    "copy": lambda x, w, b: torch.as_strided_copy(x, (3, 2), (4, 2), 1) * 3,
    "copy of transposed": lambda x, w, b: torch.as_strided_copy((x * 2).t() * 1, (3, 2), (4, 2), 1) * 3,
    "nothing": lambda x, w, b: ((x * 2).as_strided((0, 2), (1, 1)), w * 2),
    "beyond the view": beyond,
    "read after a write": read_after_write,
    "of strided": of_strided,
    "under no_grad": under_no_grad,
    "complex parts": complex_parts,
    "of an input": of_input,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_like_eager(name: str, way: str) -> None:
    assert_like_eager(PROGRAMS[name], inputs, **WAYS[way])


def test_memory_behind_an_input_is_left_to_eager() -> None:
    def reach_back(x: Tensor) -> Tensor:
        return x.as_strided((2,), (1,), 0) * 2

    whole = torch.arange(6.0)
    assert_close(tessera.jit(reach_back)(whole[3:]), torch.tensor([0.0, 2.0]))
    with pytest.raises(CaptureError, match="as_strided"):
        tessera.jit(reach_back, frontend="functional", strict=True)(whole[3:])


# --- derivatives and batching -------------------------------------------------------------------------


def scattered(x: Tensor) -> Tensor:
    return torch.as_strided_scatter(x * x, x[:2, :2].sin(), (2, 2), (4, 1), 1).pow(3)


def scattered_by_hand(x: Tensor) -> Tensor:
    """PyTorch's own derivative of as_strided_scatter is not right; of these three it is."""
    y = (x * x).clone()
    y.as_strided((2, 2), (4, 1), 1).copy_(x[:2, :2].sin())
    return y.pow(3)


FUNCTIONS: dict[str, tuple[Callable, Callable]] = {
    "scatter": (scattered, scattered_by_hand),
    **{
        name: (fn, fn)
        for name, fn in {
            "read": lambda x: (x * x).as_strided((3, 2), (4, 2), 1).pow(3),
            "windows": lambda x: (x * x).as_strided((5, 4), (2, 1)).pow(3),
            "diagonal": lambda x: (x @ x.t()).clone().fill_diagonal_(2.0).pow(2),
            "transposed": lambda x: (x * x).t().clone().as_strided((3, 2), (4, 2), 1).pow(3),
            "copied": lambda x: torch.as_strided_copy((x * x).t(), (3, 2), (4, 1)).pow(3),
        }.items()
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms(name: str) -> None:
    fn, plain = FUNCTIONS[name]
    torch.manual_seed(0)
    x, rows = torch.randn(3, 4), torch.randn(5, 3, 4)
    moved = torch.randn(4, 3).t()  # a tangent in other strides

    def total(x: Tensor) -> Tensor:
        return fn(x).sum()

    def plain_total(x: Tensor) -> Tensor:
        return plain(x).sum()

    assert_close(tessera.grad(total)(x), functional.jacobian(plain_total, x))
    assert_close(tessera.jvp(fn, (x,), (moved,))[1], functional.jvp(plain, x, moved)[1])
    assert_close(tessera.vmap(fn)(rows), torch.stack([plain(row.clone()) for row in rows]))
    assert_close(tessera.hessian(total)(x), functional.hessian(plain_total, x))
    each = torch.stack([functional.jacobian(plain_total, row.clone()) for row in rows])
    assert_close(tessera.vmap(tessera.grad(total))(rows), each)


def test_a_tensor_that_becomes_another_view_of_its_memory():
    def f(x):
        y = x * 2
        y.as_strided_((3, 2), (1, 3))
        return y.sin() + 1

    assert_like_eager(f, lambda: [torch.arange(6.0).view(2, 3).requires_grad_()])


@pytest.mark.parametrize("size", [1, 2])
def test_adaptive_pools_of_images_with_channels_last(size):
    def f(x):
        return torch.nn.functional.adaptive_avg_pool2d(x * 1, size).square()

    def image():
        return [torch.arange(256.0).view(2, 8, 4, 4).to(memory_format=torch.channels_last).requires_grad_()]

    assert_like_eager(f, image)
