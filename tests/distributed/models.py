"""Small models that plans are tried on: a GPT with tied weights, a Llama with grouped heads, experts, an encoder with a
decoder, a net with batch norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tessera

VOCABULARY, WIDTH, LENGTH = 48, 16, 8


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.o(a)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    """Its head is its table of words."""

    def __init__(self, layers: int = 2, heads: int = 4, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(GPTBlock(WIDTH, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, pairs: int) -> None:
        super().__init__()
        self.heads, self.pairs, self.size = heads, pairs, width // heads
        self.n1, self.n2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, pairs * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.size).transpose(1, 2)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        n = self.n1(x)
        q, k, v = (
            self.split(self.q(n), self.heads),
            self.split(self.k(n), self.pairs),
            self.split(self.v(n), self.pairs),
        )
        q, k = rotated(q, turns), rotated(k, turns)
        k, v = (y.repeat_interleave(self.heads // self.pairs, 1) for y in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(a)
        n = self.n2(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = turns.cos(), turns.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Llama(nn.Module):
    def __init__(self, layers: int = 2, heads: int = 4, pairs: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(LlamaBlock(WIDTH, heads, pairs) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.half = WIDTH // heads // 2

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        steps = torch.arange(ids.shape[1], dtype=x.dtype, device=x.device)[:, None]
        turns = steps * 0.1 ** torch.arange(self.half, dtype=x.dtype, device=x.device)
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """Each token goes to the two of its experts that a router prefers; one more sees all tokens."""

    def __init__(self, width: int, experts: int, capacity: float | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * width, width) / 4)
        self.down = nn.Parameter(torch.randn(experts, width, width) / 4)
        self.shared, self.capacity = nn.Linear(width, width), capacity

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, choice = self.router(tokens).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        gate, up = self.gate_up.chunk(2, 1)
        out = tessera.experts(tokens, choice, weights, up, self.down, gate, capacity=self.capacity)
        return out.view(x.shape) + F.silu(self.shared(x))


class MoE(nn.Module):
    """Llama's attention, experts behind it."""

    def __init__(self, layers: int = 2, heads: int = 4, experts: int = 4, capacity: float | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(LlamaBlock(WIDTH, heads, 2) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(WIDTH, experts, capacity) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.half = WIDTH // heads // 2

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        steps = torch.arange(ids.shape[1], dtype=x.dtype, device=x.device)[:, None]
        turns = steps * 0.1 ** torch.arange(self.half, dtype=x.dtype, device=x.device)
        for block, experts in zip(self.blocks, self.experts, strict=True):
            x = block(x, turns)
            x = x + experts(self.norm(x))
        return self.head(self.norm(x))


class Attention(nn.Module):
    """Of queries to what another sequence, or the same one, says."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q(x), *self.kv(source).chunk(2, -1))
        )
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class EncoderDecoder(nn.Module):
    """It reads the first half of a sequence, and every layer of the decoder looks at what it made of that."""

    def __init__(self, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.encoder, self.own, self.cross = (
            nn.ModuleList(Attention(WIDTH, heads, causal) for _ in range(layers)) for causal in (False, True, False)
        )
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        source = self.words(ids[:, : ids.shape[1] // 2])
        for attend, layer in zip(self.encoder, self.layers, strict=True):
            source = source + attend(self.norm(source), self.norm(source))
            source = source + F.gelu(layer(self.norm(source)))
        x = self.words(ids)
        for own, cross in zip(self.own, self.cross, strict=True):
            x = x + own(self.norm(x), self.norm(x))
            x = x + cross(self.norm(x), source)
        return self.head(self.norm(x))


class Pictures(nn.Module):
    """Convolutions and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.c2, self.b2 = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.b1(self.c1(x)))
        x = F.relu(self.b2(self.c2(x)))
        return self.head(x.mean((2, 3)))


def token_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    logits = model(ids)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def token_batches(count: int, rows: int = 4) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [[torch.randint(0, VOCABULARY, (rows, LENGTH), generator=draw) for _ in range(2)] for _ in range(count)]


def picture_loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


def picture_batches(count: int, rows: int = 4) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        [
            torch.randn(rows, 3, 6, 6, dtype=torch.float64, generator=draw),
            torch.randint(0, 10, (rows,), generator=draw),
        ]
        for _ in range(count)
    ]
