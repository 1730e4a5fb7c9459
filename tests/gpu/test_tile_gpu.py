"""Fused regions on a CUDA device, through the Triton target, against eager PyTorch and float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tessera

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def rotary(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rms(x, r, w):
    h = x + r
    return F.rms_norm(h, (h.shape[-1],), w), h


CASES = {
    "pointwise": (lambda x, y: (x * y + 1).tanh() * y.sigmoid(), [(513, 1027), (513, 1027)]),
    "broadcast": (lambda x, b: (x + b).relu() * 2, [(64, 33, 70), (70,)]),
    "softmax": (lambda x: x.softmax(-1), [(300, 5000)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (1000,), w, b), [(257, 1000), (1000,), (1000,)]),
    "rms_norm": (rms, [(257, 4096), (257, 4096), (4096,)]),
    "gelu": (lambda x: F.gelu(x) * 2, [(1000, 3000)]),
    "silu_mul": (lambda x, y: F.silu(x) * y, [(1000, 3000), (1000, 3000)]),
    "row_sum": (lambda x: (x * 2).sum(-1), [(777, 3001)]),
    "column_sum": (lambda x: (x * 2).sum(0), [(3001, 777)]),
    "transpose": (lambda x: x.t().contiguous() + 1, [(1030, 515)]),
    "rotary": (rotary, [(2, 8, 128, 64), (128, 32), (128, 32)]),
    "long_rows": (lambda x: x.log_softmax(-1), [(64, 65536)]),
    "few_long_rows": (lambda x: (x * 2).softmax(-1), [(8, 128256)]),
    "one_long_row": (lambda x: (x * 2).log_softmax(-1), [(1, 1_000_003)]),
    "few_totals": (lambda x: (x * 2).logsumexp(-1), [(3, 300_001)]),
    "cumsum": (lambda x: x.sigmoid().cumsum(-1), [(50, 300)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_region_agrees_with_eager(name, dtype):
    torch._dynamo.reset()
    torch.manual_seed(0)
    fn, shapes = CASES[name]
    args = [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]
    exact = [a.detach().double().requires_grad_() for a in args]
    fast = tessera.jit(fn, executors=["tile", "sdpa", "aten"], strict=True)
    outs = [o if isinstance(o, tuple) else (o,) for o in (fast(*args), fn(*args), fn(*exact))]
    cts = [torch.randn_like(o) for o in outs[1]]
    grads = [
        torch.autograd.grad(o, x, [c.to(t.dtype) for c, t in zip(cts, o, strict=True)], allow_unused=True)
        for o, x in zip(outs, (args, args, exact), strict=True)
    ]
    for mine, theirs, truth in zip((*outs[0], *grads[0]), (*outs[1], *grads[1]), (*outs[2], *grads[2]), strict=True):
        scale = truth.norm() + 1e-20
        error, eager = ((x.double() - truth).norm() / scale for x in (mine, theirs))
        assert error <= 2 * eager + (1e-6 if dtype == torch.float32 else 4e-3), (name, error.item(), eager.item())
    told = str(tessera.explain(fast))
    assert "tile" in told, told


@pytest.mark.parametrize("fn", [lambda x: x.softmax(-1), lambda x: x.logsumexp(-1)], ids=["softmax", "logsumexp"])
def test_infinities_in_rows_that_are_shared_out(fn):
    """Whole parts of a row count for nothing; rows of which nothing counts are eager's."""
    torch._dynamo.reset()
    x = torch.randn(4, 100_000, device="cuda")
    x[0, 10_000:] = x[1] = -torch.inf
    x[2, 70_000] = torch.inf
    x[3, 99_999] = torch.nan
    fast = tessera.jit(lambda x: fn(x * 2), executors=["tile", "sdpa", "aten"], strict=True)
    torch.testing.assert_close(fast(x), fn(x * 2), equal_nan=True)


SINGULAR = {  # functions whose value at a subnormal number is far from the value at zero
    "rsqrt": lambda x, y: torch.rsqrt(x * 1),
    "log": lambda x, y: torch.log(x * 1),
    "log2": lambda x, y: torch.log2(x * 1),
    "log10": lambda x, y: torch.log10(x * 1),
    "sqrt": lambda x, y: torch.sqrt(x * 1) * 1e20,
    "reciprocal": lambda x, y: torch.reciprocal(x * 1) * 1e-20,
    "div": lambda x, y: (x * 1) / y,
    "atan2": lambda x, y: torch.atan2(x * 1, y),
    "pow": lambda x, y: torch.pow(x * 1, -0.5),
    "pow_tensor": lambda x, y: torch.pow(x * 1, y * 1e38),
    "fmod": lambda x, y: torch.fmod(x * 1, y) * 1e38,
    "remainder": lambda x, y: torch.remainder(x * 1, -y) * 1e38,
    "floor_divide": lambda x, y: torch.floor_divide(x * 1, y),
}


@pytest.mark.parametrize("name", SINGULAR)
def test_functions_of_subnormal_numbers(name):
    torch._dynamo.reset()
    x = torch.tensor([1e-40, 3e-39, 1.2e-38, 1e-30, 0.0, 1.0, 2e-45, float("inf")], device="cuda").repeat(64)
    y = torch.tensor([2e-40, 1e-39, 7e-39, 3e-31, 1e-40, 2.0, 1e-44, 1.0], device="cuda").repeat(64)
    got = tessera.jit(SINGULAR[name], executors=["tile", "aten"], strict=True)(x, y)
    torch.testing.assert_close(got, SINGULAR[name](x, y), rtol=1e-5, atol=1e-6, equal_nan=True)
