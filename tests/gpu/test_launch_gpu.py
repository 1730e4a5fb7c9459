"""Triton kernels of the user's on a CUDA device: launched inside a compiled program, and registered as operators."""

from __future__ import annotations

import pytest
import torch

import tessera
from tessera.util.config import override

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)


@triton.jit
def double_kernel(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(x + i, tl.load(x + i, mask=inside) * 2, mask=inside)


@pytest.fixture(autouse=True)
def strict():  # noqa: ANN201
    torch._dynamo.reset()
    with override(strict=True):
        yield


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    n = x.numel()
    add_kernel[(triton.cdiv(n, 128),)](x, y, out, n, BLOCK=128)
    return out


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("executors", [["aten"], ["tile", "aten"]])
def test_a_launch_is_one_equation(executors: list[str], dynamic: bool | None) -> None:
    fast = tessera.jit(lambda x, y: add(x * 2, y).relu() + 1, executors=executors, dynamic=dynamic)
    for n in (1000, 1500, 2000):
        x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
        torch.testing.assert_close(fast(x, y), (x * 2 + y).relu() + 1)
    text = "\n".join(str(s.trace) for s in tessera.stages(fast))
    assert "tessera.launch(" in text and "over=['out']" in text


def test_an_input_is_written_in_place() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        double_kernel[(triton.cdiv(x.numel(), 128),)](x, x.numel(), BLOCK=128)
        return x.sum()

    x = torch.randn(500, device="cuda")
    mine = x.clone()
    torch.testing.assert_close(tessera.jit(double)(mine), (2 * x).sum())
    torch.testing.assert_close(mine, 2 * x)


def test_through_torch_compile() -> None:
    x, y = torch.randn(300, device="cuda"), torch.randn(300, device="cuda")
    fast = torch.compile(lambda x, y: add(x, y) * 2, backend="tessera")
    torch.testing.assert_close(fast(x, y), (x + y) * 2)
