"""Products in 8 bits: what they become, how far off they are, and where layers stay as they are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tessera
from tessera.just_in_time.compiled import compiled_state
from tessera.ops import fp8 as fp8_op
from tessera.ops.fp8 import ERROR, FLOOR, refusal
from tessera.ops.quantized import dequantized
from tessera.passes.patterns import fp8 as fp8_pass
from tessera.tile.from_trace.lower import pointwise as lower_pointwise
from tessera.tools.llama import Llama, LlamaConfig

SDPA_TILE = ["sdpa", "tile", "aten"]
LIBRARY = pytest.mark.skipif(not fp8_op.scales_rows("cpu"), reason="this PyTorch has no scales of rows on a CPU")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with tessera.override(fp8_matmul="on", verify=True):
        yield


class Gated(nn.Module):
    def __init__(self, width: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def quantized(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    model = model.to(dtype).eval()
    tessera.quantize(model, "fp8")
    return model


@torch.no_grad()
def compiled(model, *args, executors=("aten",), **options):
    """What the compiled model gives, its one compilation, and the function itself."""
    fast = tessera.jit(model, executors=list(executors), strict=True, **options)
    found = fast(*args)
    return found, compiled_state(fast).compilations()[-1], fast


def count(trace, name: str) -> int:
    return sum(getattr(eqn.op, "_opname", "") == name for eqn in trace.equations)


def bound(x: torch.Tensor, layer) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact product with the weights as they are stored, and how far off an element may be."""
    w = dequantized(layer.weight, layer.scale, "fp8").double()
    flat = x.double().flatten(0, -2)
    allowed = ERROR * flat.abs() @ w.abs().t() + FLOOR * flat.abs().amax(1, keepdim=True) * w.abs().sum(1)
    exact = flat @ w.t() + (0 if layer.bias is None else layer.bias.double())
    return exact, allowed + 2**-8 * (exact.abs() + (0 if layer.bias is None else layer.bias.double().abs()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("executors", [["aten"], SDPA_TILE])
@pytest.mark.parametrize("shape", [(17, 64), (3, 16, 64)])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_the_error_is_bounded(dtype, executors, shape, spread):
    model = quantized(nn.Sequential(nn.Linear(64, 48)), dtype)
    x = (torch.randn(shape) * 10.0 ** (spread * (torch.rand(shape) - 1))).to(dtype)
    found, compilation, _ = compiled(model, x, executors=executors)
    assert found.shape == (*shape[:-1], 48) and found.dtype is dtype and found.is_contiguous()
    assert len(compilation.account.fp8.multiplied) == 1
    exact, allowed = bound(x, model[0])
    assert ((found.double().flatten(0, -2) - exact).abs() <= allowed).all()


@LIBRARY
def test_what_a_layer_becomes():
    model = quantized(Gated())
    x = torch.randn(4, 8, 64, dtype=torch.bfloat16)
    _, compilation, fast = compiled(model, x)
    trace = dict(compilation.account.stages)["fp8"]
    assert count(trace, "_scaled_mm") == 3 and count(trace, "quantized_linear") == 0
    assert count(trace, "amax") == 2  # the two layers that read the norm share their input
    assert "dtype=torch.float8_e4m3fn" in str(trace)
    assert "multiplied in 8 bits: quantized_linear, quantized_linear_1, quantized_linear_2" in str(
        tessera.explain(fast)
    )
    assert [v.name for v in trace.outputs] == [v.name for v in compilation.account.stages[0][1].outputs]


@LIBRARY
def test_rounding_fuses_with_what_comes_before():
    model = quantized(Gated())
    x = torch.randn(4, 8, 64, dtype=torch.bfloat16)
    found, compilation, _ = compiled(model, x, executors=SDPA_TILE)
    taken = [claim.operators for claim in compilation.account.claims if claim.executor == "tile"]
    norm = next(ops for ops in taken if "aten.rsqrt" in ops)
    gate = next(ops for ops in taken if "aten.silu" in ops)
    for ops in (norm, gate):
        assert "aten.amax" in ops and ops.count("aten._to_copy") >= 2
    plain, _, _ = compiled(model, x)
    torch.testing.assert_close(found, plain, rtol=0.02, atol=0.05)


def test_where_the_library_cannot_the_product_is_written_out(monkeypatch):
    model = quantized(Gated())
    x = torch.randn(4, 8, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(fp8_pass, "scales_rows", lambda kind: False)
    found, compilation, _ = compiled(model, x)
    trace = dict(compilation.account.stages)["fp8"]
    assert count(trace, "_scaled_mm") == 0 and count(trace, "mm") == 3
    with tessera.override(fp8_matmul="off"), torch.no_grad():
        assert (found - model(x)).norm() < 0.03 * found.norm()


@pytest.mark.parametrize(
    "layer, shape, dtype, reason",
    [
        (nn.Linear(64, 20), (32, 64), torch.bfloat16, "the weight's height of 20 is no multiple of 16"),
        (nn.Linear(40, 32), (32, 40), torch.bfloat16, "the weight's width of 40 is no multiple of 16"),
        (nn.Linear(64, 32), (16, 64), torch.bfloat16, "over 16 rows reading the weights is all the work"),
        (nn.Linear(64, 32), (32, 64), torch.float32, "its input is f32[32, 64]; the product gives 16 bits"),
    ],
)
def test_layers_that_stay_say_why(layer, shape, dtype, reason):
    model = quantized(nn.Sequential(layer), dtype)
    x = torch.randn(shape, dtype=dtype)
    found, compilation, fast = compiled(model, x)
    assert "fp8" not in dict(compilation.account.stages) and compilation.account.fp8.left[0][1] == reason
    assert f"not quantized_linear: {reason}" in str(tessera.explain(fast))
    with torch.no_grad():
        torch.testing.assert_close(found, model(x))


def test_a_weight_that_was_cast_stays():
    model = quantized(nn.Sequential(nn.Linear(64, 32)))
    model[0].weight = model[0].weight.to(torch.bfloat16)
    _, compilation, _ = compiled(model, torch.randn(32, 64, dtype=torch.bfloat16))
    assert compilation.account.fp8.left[0][1] == "its weight was turned into bf16[32, 64]"


def test_flags_and_devices():
    cpu = torch.device("cpu")
    assert refusal(cpu) == ""
    with tessera.override(fp8_matmul="auto"):
        assert refusal(cpu) == "cpu gains nothing from it"
    with tessera.override(fp8_matmul="off"):
        assert refusal(torch.device("cuda")) == "the flag fp8_matmul is off"
        _, compilation, _ = compiled(quantized(Gated()), torch.randn(32, 64, dtype=torch.bfloat16))
        assert not compilation.account.fp8.multiplied


def test_older_gpus_are_refused(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, reason in (((8, 0), "cuda:0 has no numbers of 8 bits"), ((8, 9), ""), ((9, 0), "")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        with tessera.override(fp8_matmul="auto"):
            assert refusal(device) == reason


def test_odd_rows():
    """Zeros, one huge number, NaN and infinity: each stays in its own row."""
    model = quantized(nn.Sequential(nn.Linear(64, 32, bias=False)))
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    x[0], x[1, 3], x[2, 5], x[3, 7] = 0.0, 1e30, float("nan"), float("inf")
    found, _, _ = compiled(model, x)
    assert (found[0] == 0).all() and found[2].isnan().all() and not found[3].isfinite().any()
    exact, allowed = bound(x[[1, *range(4, 32)]], model[0])
    assert ((found[[1, *range(4, 32)]].double() - exact).abs() <= allowed).all()


def test_rows_in_another_order():
    model = quantized(nn.Sequential(nn.Linear(64, 32)))
    x = torch.randn(64, 40, dtype=torch.bfloat16).t()
    found, _, _ = compiled(model, x)
    exact, allowed = bound(x, model[0])
    assert ((found.double() - exact).abs() <= allowed).all()


def test_sizes_may_be_symbolic():
    model = quantized(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)))
    fast = tessera.jit(model, executors=["aten"], strict=True, dynamic=True)
    for rows in (24, 40):
        x = torch.randn(2, rows, 64, dtype=torch.bfloat16)
        with torch.no_grad():
            found, wanted = fast(x), model(x)
        assert (found - wanted).norm() < 0.06 * wanted.norm()
    assert compiled_state(fast).compilations()[-1].account.fp8.multiplied


def test_prefill_of_a_llama():
    config = LlamaConfig(layers=2, width=64, heads=4, kv_heads=2, hidden=128, vocab=96)
    model = Llama(config).bfloat16().eval()
    full = copy.deepcopy(model).float()
    tessera.quantize(model, "fp8")
    exact = copy.deepcopy(model).float()
    tokens = torch.randint(96, (2, 24))
    found, compilation, _ = compiled(model, tokens, executors=SDPA_TILE)
    assert len(compilation.account.fp8.multiplied) == 7 * config.layers + 1
    with torch.no_grad():
        weights = (exact(tokens) - full(tokens)).norm()
        wanted = exact(tokens)
    off = (found.float() - wanted).norm()
    assert off < 0.1 * wanted.norm() and off < 2 * weights  # no worse than what rounding the weights did


@pytest.mark.parametrize("value", [0.0, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 0.01, 1.0, 1.0625, 447.0, 448.0, 464.0])
def test_kernels_round_as_the_library_does(value):
    x = torch.tensor([value, -value] * 32)

    def f(x):
        return (x * 1.0 + 0.0).to(torch.float8_e4m3fn)

    found, compilation, _ = compiled(f, x, executors=["tile", "aten"])
    assert any(claim.executor == "tile" for claim in compilation.account.claims)
    assert torch.equal(found.view(torch.uint8)[0], f(x).view(torch.uint8)[0])


def test_too_large_and_nan_as_the_library_has_them():
    x = torch.tensor([464.5, 480.0, 1e9, float("inf"), float("nan"), -1e9] * 16)

    def f(x):
        return (x * 1.0 + 1.0).to(torch.float8_e4m3fn)

    found, _, _ = compiled(f, x, executors=["tile", "aten"])
    torch.testing.assert_close(found.float(), f(x).float(), equal_nan=True, rtol=0, atol=0)


def test_too_large_is_nan_where_the_library_says_so(monkeypatch):
    monkeypatch.setattr(lower_pointwise, "saturates", lambda kind: False)
    x = torch.tensor([448.0, 464.0, 464.5, float("inf"), -1e9] * 15)
    found, _, _ = compiled(lambda x: (x * 1.0 - 0.0).to(torch.float8_e4m3fn), x, executors=["tile", "aten"])
    assert found[:2].float().tolist() == [448.0, 448.0] and found[2:5].float().isnan().all()
