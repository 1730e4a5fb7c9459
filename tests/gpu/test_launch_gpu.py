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
    fast = torch.compile(lambda x, y: add(x, y) * 2, backend=tessera.backend)
    torch.testing.assert_close(fast(x, y), (x + y) * 2)


# --- registered ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_registered_triton_kernel(dtype: torch.dtype) -> None:
    op = tessera.register_kernel(
        f"tessera_gpu::add_{str(dtype)[6:]}",
        add_kernel,
        outputs={"out": "x"},
        given={"n": lambda x: x.numel(), "BLOCK": 256},
        grid=lambda n, BLOCK: (triton.cdiv(n, BLOCK),),
        vjp=lambda ct, out, x, y: (ct, ct),
    )
    fast = tessera.jit(lambda x, y: (op(x, y) * 2).relu(), executors=["tile", "aten"], dynamic=True)
    for n in (100, 1000, 5000):
        x = torch.randn(n, 3, device="cuda", dtype=dtype, requires_grad=True)
        y = torch.randn(n, 3, device="cuda", dtype=dtype)
        z = fast(x, y)
        torch.testing.assert_close(z, ((x + y) * 2).relu())
        z.sum().backward()
        torch.testing.assert_close(x.grad, 2.0 * (x + y > 0).to(dtype))
    torch.testing.assert_close(tessera.vmap(op)(x[:4], y[:4]), x[:4] + y[:4])


def test_a_tuned_kernel() -> None:
    configs = [triton.Config({"BLOCK": n}, num_warps=4) for n in (128, 512)]
    op = tessera.register_kernel(
        "tessera_gpu::tuned_add",
        triton.autotune(configs, key=["n"])(add_kernel),
        outputs={"out": "x"},
        given={"n": lambda x: x.numel()},
        grid=lambda n, BLOCK: (triton.cdiv(n, BLOCK),),
    )
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    torch.testing.assert_close(op(x, y), x + y)


def test_a_tile_program_on_the_gpu() -> None:
    from tessera.tile.dialect.build import KernelBuilder, f32

    k = KernelBuilder("scaled_sum", ["n"])
    i = k.axis("i", "n")
    bx, by, bout = k.buffer(f32), k.buffer(f32), k.buffer(f32)
    k.store(k.apply("add", k.load(bx, i), k.apply("mul", k.load(by, i), k.constant(2.0, f32))), bout, i)
    op = tessera.register_kernel(
        "tessera_gpu::scaled_sum",
        k.finish(),
        names=("x", "y", "out"),
        outputs={"out": "x"},
        given={"n": lambda x: x.numel()},
    )
    for device in ("cuda", "cpu"):
        x, y = torch.randn(300, 7, device=device), torch.randn(300, 7, device=device)
        torch.testing.assert_close(tessera.jit(op)(x, y), x + 2 * y)
