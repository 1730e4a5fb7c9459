"""A model whose layers lie on several ranks: each has a part of the weights and of the optimizer's state.

    torchrun --nproc-per-node=2 examples/pipeline.py
    torchrun --nproc-per-node=4 examples/pipeline.py --schedule zero-bubble --data 2

Started without torchrun, it shows the program of one rank of two that are not there.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tessera

WIDTH, LAYERS, ROWS = 32, 8, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(-1)).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved, zero-bubble or dualpipe")
    parser.add_argument("--data", type=int, default=1, help="ranks that share the batch")
    parser.add_argument("--steps", type=int, default=5)
    chosen = parser.parse_args()
    ranks, alone = int(os.environ.get("WORLD_SIZE", 2)), "RANK" not in os.environ
    mesh = tessera.mesh(dp=chosen.data, pp=ranks // chosen.data, fake=alone)
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS))).to(mesh.device_type)
    tessera.shard(model, mesh, {"dp": "zero1", "pp": chosen.schedule}, microbatches=2 * mesh["pp"].size())
    step = tessera.train_step(model, loss_of, torch.optim.AdamW(model.parameters(), lr=3e-3))
    for number in range(1 if alone else chosen.steps):
        torch.manual_seed(number)
        batch = torch.randn(ROWS, WIDTH, device=mesh.device_type)
        loss = step(batch.chunk(chosen.data)[mesh.get_local_rank("dp")])
        if dist.get_rank() == 0 and not alone:
            print(f"step {number}: loss {float(loss):.4f}")
    if dist.get_rank() == 0:
        print(tessera.explain(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
