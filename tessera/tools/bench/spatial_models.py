"""What `tessera bench spatial` spreads over several chips: blocks of large language models, decoding.

Weights are eight bits wide where the published models are served so. They are random: cycles do not depend on them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

EIGHT = torch.float8_e4m3fn


class Eight(nn.Module):
    """A layer of eight bits, whose inputs are rounded to eight bits too."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.register_buffer("weight", (torch.randn(out, wide) / wide**0.5).to(EIGHT))
        self.register_buffer("one", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(x.to(EIGHT), self.weight.t(), self.one, self.one, out_dtype=torch.bfloat16)


class LlamaBlock(nn.Module):
    """A block of a Llama that decodes a token for each of some rows; caches are written in place."""

    def __init__(self, rows: int, wide: int, heads: int, groups: int, inner: int, longest: int) -> None:
        super().__init__()
        self.rows, self.heads, self.groups, self.each = rows, heads, groups, wide // heads
        self.before, self.behind = (nn.RMSNorm(wide, eps=1e-5, dtype=torch.bfloat16) for _ in range(2))
        self.q, self.o = Eight(wide, wide), Eight(wide, wide)
        self.k, self.v = (Eight(wide, groups * self.each) for _ in range(2))
        self.gate, self.up, self.down = Eight(wide, inner), Eight(wide, inner), Eight(inner, wide)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(longest, rows, groups, self.each).bfloat16())
        angles = torch.arange(longest)[:, None] / 10000 ** (torch.arange(0, self.each, 2) / self.each).repeat(2)
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())
        self.register_buffer("places", torch.arange(longest))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        q, k, v = (f(y).view(self.rows, -1, self.each) for f in (self.q, self.k, self.v))
        cos, sin, half = self.cos[at], self.sin[at], self.each // 2
        q, k = (t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin for t in (q, k))
        self.keys[at] = k[None]
        self.values[at] = v[None]
        keys, values = (t.permute(1, 2, 0, 3) for t in (self.keys, self.values))
        mask = (self.places <= at)[None]
        a = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)
        x = x + self.o(a.reshape(self.rows, -1))
        y = self.behind(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))
