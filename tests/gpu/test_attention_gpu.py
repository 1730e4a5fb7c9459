"""Gradients of attention on a GPU against float32: every layout, mask, head size and order of callers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import tessera

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

B, H = 2, 4


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def layout(kind: str, tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """c: contiguous [B, H, T, D] · p: [B, T, H, D] transposed · s: a slice of a packed qkv."""
    if kind == "c":
        return torch.randn(B, H, tokens, width, device="cuda", dtype=dtype)
    if kind == "p":
        return torch.randn(B, tokens, H, width, device="cuda", dtype=dtype).transpose(1, 2)
    return torch.randn(B, tokens, 3, H, width, device="cuda", dtype=dtype).permute(2, 0, 3, 1, 4)[1]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def gradients(fn: Callable, inputs: list[torch.Tensor], ct: torch.Tensor) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    fn(*leaves).backward(ct)
    return [t.grad for t in leaves]


def heads_last(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)


def as_it_is(out: torch.Tensor) -> torch.Tensor:
    return out


MASKS = ("none", "causal", "bool", "float")
KINDS = ("ccc", "ccs", "sss", "cpp", "ppp", "pcc")


@pytest.mark.parametrize("executors", [None, ["aten"]])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kinds", KINDS)
def test_gradients_of_attention(kinds, mask, executors):
    for (width, tokens), after in itertools.product(((64, 128), (72, 200), (128, 96)), (heads_last, as_it_is)):
        torch._dynamo.reset()
        inputs = [layout(k, tokens, width, torch.bfloat16) for k in kinds]
        bias = None
        if mask in ("bool", "float"):
            bias = torch.rand(B, 1, tokens, tokens, device="cuda") < 0.8
            bias[..., 0] = True
            bias = bias if mask == "bool" else torch.zeros_like(bias, dtype=torch.bfloat16).masked_fill(~bias, -1e4)

        def attend(q, k, v, bias=bias, after=after):
            given = bias if bias is None or bias.dtype == torch.bool else bias.to(q.dtype)
            return after(F.scaled_dot_product_attention(q * 1.0, k, v, given, is_causal=mask == "causal"))

        shape = (B, tokens, H * width) if after is heads_last else (B, H, tokens, width)
        ct = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        truth = gradients(attend, [t.float() for t in inputs], ct.float())
        got = gradients(tessera.jit(attend, executors=executors, strict=True), inputs, ct)
        assert max(map(error, got, truth)) < 0.02, (kinds, mask, width, tokens, after.__name__)


@pytest.mark.parametrize("first", [heads_last, as_it_is])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_eager_code_did_before_does_not_show(first, dropout):
    """The library keeps plans between calls, whose layouts are those of the first caller."""
    width = 64
    for after in (heads_last, as_it_is):
        inputs = [layout("c", 160, width, torch.bfloat16) for _ in range(3)]
        shapes = {heads_last: (B, 160, H * width), as_it_is: (B, H, 160, width)}

        def attend(q, k, v, after=after):
            return after(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout))

        gradients(lambda q, k, v: attend(q, k, v, first), inputs, torch.randn(shapes[first], device="cuda").bfloat16())
        ct = torch.randn(shapes[after], device="cuda", dtype=torch.bfloat16)
        torch._dynamo.reset()
        fast = tessera.jit(attend, strict=True, executors=["aten"])
        torch.manual_seed(1)
        got = gradients(fast, inputs, ct)
        if dropout:  # the same mask twice: gradients are linear in the cotangent
            torch.manual_seed(1)
            twice = gradients(fast, inputs, ct * 2)
            assert max(error(t, g * 2) for t, g in zip(twice, got, strict=True)) < 0.01
            continue
        truth = gradients(attend, [t.float() for t in inputs], ct.float())
        assert max(map(error, got, truth)) < 0.02


def test_a_diffusion_transformers_attention_trains_as_in_float32():
    """q and k are normalised, so that they are contiguous while v is a slice of the packed projection."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(256, 768), torch.nn.Linear(256, 256)
            self.q_norm, self.k_norm = (torch.nn.LayerNorm(64, bias=False) for _ in range(2))

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
            return x + self.out(y.transpose(1, 2).flatten(2))

    model = Block().cuda()
    x = torch.randn(2, 192, 256, device="cuda")
    model(x).square().mean().backward()
    truth = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.bfloat16()
    tessera.jit(model, strict=True)(x.bfloat16()).float().square().mean().backward()
    for (name, p), want in zip(model.named_parameters(), truth, strict=True):
        assert error(p.grad, want) < 0.05, name


@pytest.mark.parametrize("mask", MASKS)
def test_attention_of_any_length_trains(mask):
    """PyTorch's formulas are traced over symbolic sizes: what is found out about them there becomes a guard."""

    def attend(q, k, v, bias=None):
        return F.scaled_dot_product_attention(q * 1.5, k, v * 2, bias, is_causal=mask == "causal")

    fast = tessera.jit(attend, strict=True, dynamic=True)
    for tokens in (37, 65, 128):
        inputs = [torch.randn(B, H, tokens, 64, device="cuda") for _ in range(3)]
        if mask in ("bool", "float"):
            bias = torch.randn(tokens, tokens, device="cuda")
            inputs.append(bias > -1 if mask == "bool" else bias)
        results = []
        for fn in (fast, attend):
            leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
            out = fn(*leaves)
            wrt = [t for t in leaves if t.requires_grad]
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), wrt)])
        for got, want in zip(*results, strict=True):
            assert error(got, want) < 1e-3
