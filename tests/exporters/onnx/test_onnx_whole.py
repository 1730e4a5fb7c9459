"""Whole operators that a program wrote out: RMS normalisation, rotary positions, heads that queries share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from leaving import answers, assert_same, written

RUNTIMES = ("tessera", *(("ort",) if importlib.util.find_spec("onnxruntime") is not None else ()))


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, W = floats(2, 3, 8), floats(8)
HEADS = floats(2, 4, 5, 8)  # batch, heads, length, width
ANGLES = floats(5, 4)


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def half_turn(x: torch.Tensor) -> torch.Tensor:
    x1, x2 = halves(x)
    return torch.cat([-x2, x1], dim=-1)


def doubled(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    wide = torch.cat([angles, angles], -1)[None]
    cos, sin = (wide.cos() * 1.5).unsqueeze(1), (wide.sin() * 1.5).unsqueeze(1)
    return x * cos + half_turn(x) * sin


def in_pieces(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1)


def alternating(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # length before heads
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).flatten(-2)


def of_pairs(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).reshape(x.shape)


def swapped(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = halves(x)
    return torch.cat([x1 * cos - x2 * sin, x2 * sin + x1 * cos], -1)


def in_single_precision(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


def repeated(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    batch, heads, length, width = k.shape
    k = k[:, :, None].expand(batch, heads, 2, length, width).reshape(batch, heads * 2, length, width)
    return F.scaled_dot_product_attention(q, k, k, is_causal=True)


CASES: dict[str, tuple[Callable, tuple[torch.Tensor, ...], str]] = {
    "rms norm": (
        lambda x, w: x * torch.rsqrt(x.square().mean((-1,), True) + 1e-6) * w,
        (X, W),
        "RMSNormalization",
    ),
    "rms norm by a root": (
        lambda x, w: w * (x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)),
        (X, W),
        "RMSNormalization",
    ),
    "rms norm of half precision": (in_single_precision, (X.half(), W.half()), "RMSNormalization"),
    "rotary, doubled tables": (doubled, (HEADS, ANGLES), "RotaryEmbedding"),
    "rotary, in pieces": (in_pieces, (HEADS, ANGLES), "RotaryEmbedding"),
    "rotary, alternating": (alternating, (HEADS.transpose(1, 2).contiguous(), ANGLES), "RotaryEmbedding"),
    "rotary, of pairs": (of_pairs, (HEADS, ANGLES), "RotaryEmbedding"),
    "shared heads": (repeated, (HEADS, floats(2, 2, 5, 8)), "Attention"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_recognised(name: str) -> None:
    fn, inputs, kind = CASES[name]
    model = written(fn, inputs, 23)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count(kind) == 1
    assert not {"Neg", "ReduceMean", "Sqrt"} & set(kinds)  # nothing of what it was written with stays
    for by in RUNTIMES:
        assert_same(answers(model, inputs, by), fn(*inputs))
    before = written(fn, inputs, 22)
    assert kind not in [node.op_type for node in before.graph.node]
    assert_same(answers(before, inputs, "tessera"), fn(*inputs))


OTHERS: dict[str, tuple[Callable, tuple[torch.Tensor, ...]]] = {
    "another sign": (
        lambda x, a: x * torch.cat([a, a], -1).cos() - half_turn(x) * torch.cat([a, a], -1).sin(),
        (HEADS, ANGLES),
    ),
    "halves that differ": (
        lambda x, a: x * torch.cat([a, -a], -1).exp() + half_turn(x) * torch.cat([a, a], -1),
        (HEADS, ANGLES),
    ),
    "the other half is negative": (
        lambda x, a: x * torch.cat([a, a], -1) + torch.cat([halves(x)[1], -halves(x)[0]], -1) * torch.cat([a, a], -1),
        (HEADS, ANGLES),
    ),
    "angles that swap": (
        swapped,
        (HEADS, ANGLES),
    ),
    "another mean": (lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)), (X, W)),
    "a sum": (lambda x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)), (X, W)),
    "of another tensor": (lambda x, w: w * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6)), (X, W)),
    "a weight for each row": (
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        (X, floats(3, 8)),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_one_stays(name: str) -> None:
    fn, inputs = OTHERS[name]
    model = written(fn, inputs, 23)
    assert not {"RotaryEmbedding", "RMSNormalization"} & {node.op_type for node in model.graph.node}
    for by in RUNTIMES:
        assert_same(answers(model, inputs, by), fn(*inputs))
