"""Training that goes on after a rank is lost: torchrun starts the ranks again, and they load the last state.

    torchrun --nproc-per-node=4 --max-restarts=3 examples/restart.py states
    torchrun --nproc-per-node=2 examples/restart.py states --steps 40      # goes on with fewer ranks

`--kill 3` has the last rank die in step 3, once, to see it work. Started without torchrun, it is the only rank.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tessera

ROWS, WIDTH = 16, 8


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(-1)).square().mean()


def batch(step: int) -> Tensor:
    """The data of a step depend on its number alone, so whoever goes on reads on."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def steps_made(optimizer: torch.optim.Optimizer) -> int:
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("states"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill", type=int)
    options = parser.parse_args()
    ranks, again = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    mesh = tessera.mesh(dp=ranks, timeout=60, fake="RANK" not in os.environ)
    model = tessera.shard(model_of().to(mesh.device_type), mesh, "zero3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options.folder.exists():
        tessera.load_state(options.folder, model, optimizer)
    step = tessera.train_step(model, loss_of, optimizer)
    for number in range(steps_made(optimizer), options.steps):
        if number == options.kill and not again and dist.get_rank() == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = step(batch(number).chunk(ranks)[dist.get_rank()].to(mesh.device_type))
        tessera.save_state(options.folder, model, optimizer, wait=False)
        if dist.get_rank() == 0:
            print(f"step {number} of {ranks} ranks: loss {float(loss):.6f}", flush=True)
    tessera.save_state(options.folder, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
