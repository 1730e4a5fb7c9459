"""Products in 8 bits on a GPU that has them: bounded errors, fused rounding, and the prefill of a Llama."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tessera
from tessera.just_in_time.compiled import compiled_state
from tessera.ops.fp8 import ERROR, FLOOR
from tessera.ops.quantized import dequantized
from tessera.tools.llama import Llama, LlamaConfig

CAN = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CAN, reason="needs a CUDA device with numbers of 8 bits")]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


@torch.no_grad()
def compiled(model, *args, **options):
    fast = tessera.jit(model, strict=True, **options)
    return fast(*args), compiled_state(fast).compilations()[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, width, height", [(17, 64, 48), (100, 2048, 512), (4096, 8192, 2048), (33, 16, 16)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_error_is_bounded(dtype, rows, width, height, bias):
    model = nn.Sequential(nn.Linear(width, height, bias=bias)).to("cuda", dtype).eval()
    tessera.quantize(model, "fp8")
    layer = model[0]
    x = (torch.randn(rows, width, device="cuda") * 10 ** (3 * (torch.rand(rows, width, device="cuda") - 1))).to(dtype)
    found, compilation = compiled(model, x)
    assert len(compilation.account.fp8.multiplied) == 1 and found.dtype is dtype
    w = dequantized(layer.weight, layer.scale, "fp8").double()
    exact = x.double() @ w.t() + (0 if layer.bias is None else layer.bias.double())
    allowed = ERROR * x.double().abs() @ w.abs().t() + FLOOR * x.double().abs().amax(1, keepdim=True) * w.abs().sum(1)
    worst = ((found.double() - exact).abs() - allowed - 2**-8 * exact.abs()).max()
    assert worst <= 0, f"over the bound by {worst:.3g}"


def test_odd_rows():
    model = nn.Sequential(nn.Linear(64, 32, bias=False)).to("cuda", torch.bfloat16).eval()
    tessera.quantize(model, "fp8")
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    x[0], x[2, 5], x[3, 7] = 0.0, float("nan"), float("inf")
    found, _ = compiled(model, x)
    assert (found[0] == 0).all() and found[2].isnan().all() and not found[3].isfinite().any()
    assert found[4:].isfinite().all()


def test_kernels_round_as_the_library_does():
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), device="cuda").to(torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.randn(1 << 18, device="cuda") * 100])

    def f(x):
        return (x * 1.0 + 0.0).to(torch.float8_e4m3fn)

    found, compilation = compiled(f, x, executors=["tile", "aten"])
    assert any(claim.executor == "tile" for claim in compilation.account.claims)
    torch.testing.assert_close(found.float(), f(x).float(), equal_nan=True, rtol=0, atol=0)


def test_prefill_of_a_llama():
    """As far from the quantized model with exact arithmetic as rounding activations explains, and no further."""
    config = LlamaConfig(layers=4, width=1024, heads=16, kv_heads=4, hidden=4096, vocab=8192)
    with torch.device("cuda"):
        model = Llama(config).bfloat16().eval()
    full = copy.deepcopy(model).float()
    plain, _ = compiled(model, tokens := torch.randint(8192, (2, 256), device="cuda"))
    tessera.quantize(model, "fp8")
    exact = copy.deepcopy(model).float()
    torch._dynamo.reset()
    found, compilation = compiled(model, tokens)
    assert len(compilation.account.fp8.multiplied) == 7 * config.layers + 1 and not compilation.account.fp8.left
    fused = [claim.operators for claim in compilation.account.claims if claim.executor == "tile"]
    assert sum("aten.amax" in ops for ops in fused) >= 3 * config.layers
    with torch.no_grad():
        wanted, before = exact(tokens), full(tokens)

    def off(a, b):
        return float((a.float() - b).norm() / b.norm())

    assert off(found, wanted) < 0.1, off(found, wanted)
    assert off(found, before) < 2 * off(wanted, before) + off(plain, before)
