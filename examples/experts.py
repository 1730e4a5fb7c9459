"""Experts that lie on several ranks: every token goes to two of them, wherever they are.

    torchrun --nproc-per-node=2 examples/experts.py
    torchrun --nproc-per-node=4 examples/experts.py --data 2

Every rank is given its own rows. Started without torchrun, it shows the program of one rank of two that are not there.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tessera

WIDTH, BETWEEN, EXPERTS, ROWS = 32, 64, 8, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.gate = (nn.Parameter(torch.randn(EXPERTS, BETWEEN, WIDTH) / WIDTH**0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, BETWEEN) / BETWEEN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x)
        weights, choice = self.router(tokens).softmax(-1).topk(2)
        return x + tessera.experts(tokens, choice, weights, self.up, self.down, self.gate)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(-1)).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, default=1, help="ranks that have the same experts")
    parser.add_argument("--steps", type=int, default=5)
    chosen = parser.parse_args()
    ranks, alone = int(os.environ.get("WORLD_SIZE", 2)), "RANK" not in os.environ
    mesh = tessera.mesh(dp=chosen.data, ep=ranks // chosen.data, fake=alone)
    torch.manual_seed(0)
    model = tessera.shard(Model().to(mesh.device_type), mesh, {"dp": "zero1", "ep": "experts"})
    step = tessera.train_step(model, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for number in range(1 if alone else chosen.steps):
        batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = step(batch.chunk(ranks)[dist.get_rank()].to(mesh.device_type))
        if dist.get_rank() == 0 and not alone:
            print(f"step {number}: loss {float(loss):.4f}")
    if dist.get_rank() == 0:
        print(tessera.explain(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
