"""A sequence that lies on several ranks: each has a part of every row, and attention brings the parts together.

    torchrun --nproc-per-node=2 examples/context.py
    torchrun --nproc-per-node=4 examples/context.py --way ulysses --data 2

Every rank is given whole rows. Started without torchrun, it shows the program of one rank of two that are not there.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tessera

WORDS, WIDTH, HEADS, LENGTH, ROWS = 32, 32, 4, 64, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x)


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", default="ring", help="ring or ulysses")
    parser.add_argument("--data", type=int, default=1, help="ranks that share the batch")
    parser.add_argument("--steps", type=int, default=5)
    chosen = parser.parse_args()
    ranks, alone = int(os.environ.get("WORLD_SIZE", 2)), "RANK" not in os.environ
    mesh = tessera.mesh(dp=chosen.data, cp=ranks // chosen.data, fake=alone)
    torch.manual_seed(0)
    model = tessera.shard(Model().to(mesh.device_type), mesh, {"dp": "zero3", "cp": chosen.way})
    step = tessera.train_step(model, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for number in range(1 if alone else chosen.steps):
        draw = torch.Generator().manual_seed(number)
        first = torch.randint(WORDS, (ROWS, 1), generator=draw)
        ids = (first + torch.arange(LENGTH + 1)) % WORDS  # the next word is one further
        ids = ids.chunk(chosen.data)[mesh.get_local_rank("dp")].to(mesh.device_type)
        loss = step(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        if dist.get_rank() == 0 and not alone:
            print(f"step {number}: loss {float(loss):.4f}")
    if dist.get_rank() == 0:
        print(tessera.explain(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
