"""What `tessera bench spatial` spreads over several chips: blocks of large language models, decoding.

Weights are eight bits wide where the published models are served so. They are random: cycles do not depend on them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tessera.torch_internals.operators import scaled_mm

EIGHT = torch.float8_e4m3fn


class Eight(nn.Module):
    """A layer of eight bits, whose inputs are rounded to eight bits too."""

    weight: torch.Tensor
    one: torch.Tensor

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.register_buffer("weight", (torch.randn(out, wide) / wide**0.5).to(EIGHT))
        self.register_buffer("one", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_mm(x.to(EIGHT), self.weight.t(), self.one, self.one, out_dtype=torch.bfloat16)


class Experts(nn.Module):
    """The layer of a Mixtral that chooses two of eight experts for each row. Every chip holds a part of all of them,
    and all are computed: a few rows choose nearly all, and the time never depends on which."""

    def __init__(self, wide: int, inner: int, count: int, chosen: int) -> None:
        super().__init__()
        self.norm, self.router = (
            nn.RMSNorm(wide, eps=1e-5, dtype=torch.bfloat16),
            nn.Linear(wide, count, bias=False, dtype=torch.bfloat16),
        )
        self.gate, self.up = (nn.ModuleList(Eight(wide, inner) for _ in range(count)) for _ in range(2))
        self.down = nn.ModuleList(Eight(inner, wide) for _ in range(count))
        self.chosen = chosen
        self.register_buffer("numbers", torch.arange(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        scores, places = self.router(y).topk(self.chosen, -1)
        shares = torch.softmax(scores, -1)[:, :, None] * (places[:, :, None] == self.numbers)
        shares = shares.sum(1)
        for i, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down, strict=True)):
            x = x + shares[:, i : i + 1] * down(F.silu(gate(y)) * up(y))
        return x


class Layers(nn.Module):
    """Layers of equal size, one behind the other."""

    def __init__(self, count: int, wide: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(wide, wide) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Attention(nn.Module):
    """Attention of a Llama that decodes a token for each of some rows; caches are written in place."""

    keys: torch.Tensor
    values: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    places: torch.Tensor

    def __init__(self, rows: int, wide: int, heads: int, groups: int, longest: int) -> None:
        super().__init__()
        self.rows, self.each = rows, wide // heads
        self.q, self.o = Eight(wide, wide), Eight(wide, wide)
        self.k, self.v = (Eight(wide, groups * self.each) for _ in range(2))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(longest, rows, groups, self.each).bfloat16())
        angles = torch.arange(longest)[:, None] / 10000 ** (torch.arange(0, self.each, 2) / self.each).repeat(2)
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())
        self.register_buffer("places", torch.arange(longest))

    def forward(self, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(y).view(self.rows, -1, self.each) for f in (self.q, self.k, self.v))
        cos, sin, half = self.cos[at], self.sin[at], self.each // 2
        q, k = (t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin for t in (q, k))
        self.keys[at] = k[None]
        self.values[at] = v[None]
        keys, values = (t.permute(1, 2, 0, 3) for t in (self.keys, self.values))
        mask = (self.places <= at)[None]
        a = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)
        return self.o(a.reshape(self.rows, -1))


class LlamaBlock(nn.Module):
    """A block of a Llama that decodes."""

    def __init__(self, rows: int, wide: int, heads: int, groups: int, inner: int, longest: int) -> None:
        super().__init__()
        self.before, self.behind = (nn.RMSNorm(wide, eps=1e-5, dtype=torch.bfloat16) for _ in range(2))
        self.attention = Attention(rows, wide, heads, groups, longest)
        self.gate, self.up, self.down = Eight(wide, inner), Eight(wide, inner), Eight(inner, wide)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x), at)
        y = self.behind(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The next word for each of some, all of them at one place."""

    table: torch.Tensor

    def __init__(
        self, blocks: int, rows: int, wide: int, heads: int, groups: int, inner: int, longest: int, words: int
    ):
        super().__init__()
        self.register_buffer("table", torch.randn(words, wide).to(EIGHT))
        self.blocks = nn.ModuleList(LlamaBlock(rows, wide, heads, groups, inner, longest) for _ in range(blocks))
        for block in self.blocks:
            for name in ("cos", "sin", "places"):
                setattr(block.attention, name, getattr(self.blocks[0].attention, name))
        self.norm, self.head = nn.RMSNorm(wide, eps=1e-5, dtype=torch.bfloat16), Eight(wide, words)

    def forward(self, word: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = F.embedding(word, self.table).bfloat16()
        for block in self.blocks:
            x = block(x, at)
        return self.head(self.norm(x)).argmax(-1)


def without_memory(build: Callable[[], nn.Module]) -> nn.Module:
    """A model whose weights take no memory until somebody reads them: zeros in a file with nothing in it."""
    with torch.device("meta"):
        model = build()
    places: dict[torch.Tensor, int] = {}
    size = 0
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor not in places:
            places[tensor] = size
            size += -(-tensor.nbytes // 64) * 64
    with tempfile.NamedTemporaryFile() as file:
        os.truncate(file.name, size)
        zeros = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
    known = {t: zeros[at : at + t.nbytes].view(t.dtype).view(t.shape) for t, at in places.items()}
    return model._apply(lambda t: known.get(t, t), recurse=True)
