"""Tensors of more than 2**31 elements: positions and offsets leave 32 bits, in every kind of kernel.

One test for all: each case needs tens of gigabytes, so two must not run side by side.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tessera

NEEDS = 70 << 30
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS, COLUMNS = 70_000, 32_768  # 2.29e9 elements


def table(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def chain(x: Tensor) -> Tensor:
    return torch.sin(x) * 2 + x.relu()


def rows_sum(x: Tensor) -> Tensor:
    return (x.float() * 0.5).sum(1)


def columns_sum(x: Tensor) -> Tensor:
    return (x.float() * 0.5).sum(0)


def soft(x: Tensor) -> Tensor:
    return torch.softmax(x * 0.5, -1)


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x * 2, x.shape[-1:]) + 1


def turned(x: Tensor) -> Tensor:
    return (x.t() * 2).contiguous()


def last_rows(x: Tensor) -> Tensor:
    return x[-5:] * 3 - x[:5]


def joined(x: Tensor) -> Tensor:
    return torch.cat([x[: ROWS // 2], x[ROWS // 2 :] * 2]).sigmoid()


def looked_up(x: Tensor) -> Tensor:
    places = torch.arange(0, x.shape[0], 7, device=x.device).flip(0)
    return F.embedding(places, x) * 2 + 1


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * 2).argmax(1), x.flatten()[-7:].cos()


def everything(x: Tensor) -> Tensor:
    return (x * x).mean(dtype=torch.float32)


def loss(x: Tensor) -> Tensor:
    labels = torch.arange(x.shape[0], device=x.device) % x.shape[1]
    return F.cross_entropy(x, labels, reduction="none")


FORWARD = [chain, rows_sum, columns_sum, soft, norm, turned, last_rows, joined, looked_up, largest, everything, loss]
BACKWARD = [chain, columns_sum, soft, norm, joined, looked_up, loss]


def close(got: Tensor, want: Tensor, name: str) -> None:
    """Block by block: a difference of all at once would not fit."""
    assert got.shape == want.shape and got.dtype == want.dtype, name
    for a, b in zip(got.flatten().split(1 << 28), want.flatten().split(1 << 28), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2, msg=lambda text: f"{name}: {text}")  # noqa: B023


def compare(f: Callable, x: Tensor, *, dynamic: bool | None = None) -> None:
    want = f(x)
    fast = tessera.jit(f, strict=True, dynamic=dynamic)
    if dynamic:
        fast(x[:64].clone())  # compiled for small sizes, then called with large ones
    got = fast(x)
    wanted, gotten = (out if isinstance(out, tuple) else (out,) for out in (want, got))
    for i, (a, b) in enumerate(zip(gotten, wanted, strict=True)):
        close(a, b, f"{f.__name__} {i}{' dynamic' if dynamic else ''}")


def compare_gradient(f: Callable, x: Tensor) -> None:
    leaf = x.requires_grad_()
    (want,) = torch.autograd.grad(f(leaf).float().mul(100).mean() * ROWS, leaf)
    (got,) = torch.autograd.grad(tessera.jit(f, strict=True)(leaf).float().mul(100).mean() * ROWS, leaf)
    close(got, want, f"gradient of {f.__name__}")


def test_more_elements_than_32_bits_count() -> None:
    if torch.cuda.mem_get_info()[0] < NEEDS:
        pytest.skip("needs 70 GiB of free device memory")
    torch.manual_seed(0)
    x = table()
    wrong = []
    cases = [(compare, f, {}) for f in FORWARD]
    cases += [(compare, f, {"dynamic": True}) for f in (chain, soft, rows_sum, columns_sum)]
    cases += [(compare_gradient, f, {}) for f in BACKWARD]
    for check, f, options in cases:
        try:
            check(f, x.detach(), **options)
        except Exception as error:
            wrong.append(f"{check.__name__} {f.__name__} {options}: {type(error).__name__}: {str(error)[:300]}")
        torch.cuda.empty_cache()
    assert not wrong, "\n".join(wrong)
