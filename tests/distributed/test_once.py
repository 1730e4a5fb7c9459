"""Ranks that compile: one for all on a host, while the others wait for as long as that takes, whatever the deadline."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from launch import join_group, start

import tessera
from tessera.pipeline.compilation import Compilation
from tessera.store.program import COUNTS

DEADLINE = 3.0  # seconds, and compiling takes longer


def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def train(rank: int, folder: str) -> None:
    os.environ["TESSERA_CACHE"] = f"{folder}/cache"
    build = Compilation.build

    def slow(self: Compilation, *args: object) -> None:
        time.sleep(2 * DEADLINE)
        build(self, *args)

    Compilation.build = slow
    join_group(rank, 2, f"{folder}/meet")
    mesh = tessera.mesh(device="cpu", dp=2, timeout=DEADLINE)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    with tessera.override(program_cache=True):
        step = tessera.train_step(
            model, loss, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh, plan="zero3", executors="aten"
        )
        value = float(step(torch.ones(2, 4) * (1 + rank)))
    Path(f"{folder}/{rank}").write_text(f"{COUNTS['stored']} {COUNTS['loaded']} {value!r}")
    dist.destroy_process_group()


def test_one_rank_compiles_and_the_other_waits_beyond_the_deadline(tmp_path: Path) -> None:
    assert start(2, train, str(tmp_path)) == [0, 0]
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert sorted(counts[:2] for counts in told) == [["0", "1"], ["1", "0"]]
    assert told[0][2] == told[1][2]
