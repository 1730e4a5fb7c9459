"""A Llama that decodes on 64 chips: four of them share every tensor, sixteen such stages stand behind each other.

One program decodes every word. The cache lies in the cores' memories and is written in place: where, the position says;
when, the listing. The words are those that PyTorch chooses.

    python examples/llama_on_64_chips.py [words [layers]]
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

import tessera
from tessera.spatial.program import SpatialProgram

WIDE, HEADS, GROUPS, INNER, WORDS, LONGEST = 256, 8, 4, 688, 1024, 64
EACH = WIDE // HEADS


class Layer(nn.Module):
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.RMSNorm(WIDE), nn.RMSNorm(WIDE)
        self.q, self.o = (nn.Linear(WIDE, WIDE, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDE, GROUPS * EACH, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDE, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDE, bias=False)
        self.register_buffer("keys", torch.zeros(LONGEST, GROUPS, EACH))
        self.register_buffer("values", torch.zeros(LONGEST, GROUPS, EACH))

    def forward(self, x: torch.Tensor, at: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor):
        y = self.before(x)
        q, k, v = (f(y).view(1, -1, EACH) for f in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat([-t[..., EACH // 2 :], t[..., : EACH // 2]], -1) * sin for t in (q, k))
        self.keys[at], self.values[at] = k, v
        keys, values = (t.transpose(0, 1)[None] for t in (self.keys, self.values))
        a = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True)
        x = x + self.o(a.reshape(1, -1))
        y = self.behind(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The next word for a word and its position."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, WORDS, bias=False)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(layers)), nn.RMSNorm(WIDE)
        angles = torch.arange(LONGEST)[:, None] / 10000 ** (torch.arange(0, EACH, 2) / EACH).repeat(2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, word: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x, mask = self.embed(word), (torch.arange(LONGEST) <= at)[None, None, None]
        for layer in self.layers:
            x = layer(x, at, self.cos[at], self.sin[at], mask)
        return self.head(self.norm(x)).argmax(-1)


def main(words: int = 8, layers: int = 4) -> None:
    torch.manual_seed(0)
    model, word = Llama(layers).eval(), torch.tensor([3])
    at = torch.tensor([0])
    cut = {"tensor": 4, "pipeline": 16}
    program = tessera.map_onto(model, word, at, machine="lpx", chips=64, cut=cut, effort="quick")
    assert isinstance(program, SpatialProgram)  # and no chain of blocks
    chips = {page.core.chip for page in program.listing.pages}
    print(f"on {len(chips)} chips: {program.summary()}")
    eager, state, expected = copy.deepcopy(model), None, word
    for place in range(words):
        at = torch.tensor([place])
        ran = tessera.simulate(program, word, at, state=state)
        with torch.no_grad():
            expected = eager(expected, at)
        word, state = ran.output, ran.state
        print(f"word {place}: {int(word)}, in {ran.cycles:,} cycles")
        assert ran.cycles == program.cycles and word.equal(expected)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
