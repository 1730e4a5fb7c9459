"""Forty programs whose cycles are known exactly. `cycles.txt` beside this file holds them; a change that costs cycles
shows in its diff.

    python -m tests.spatial.cases          writes the table anew
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.map import map_onto
from tessera.spatial.program import SpatialProgram
from tests.spatial.nets import MLP, Attention, Block, convolutions, toy

TABLE = Path(__file__).with_name("cycles.txt")
HEAD = "# name  cycles  bound  limit: written by python -m tests.spatial.cases"
Model = tuple[nn.Module, tuple[int, ...]]


def models() -> dict[str, Callable[[], Model]]:
    return {
        "product 1x1x1": lambda: (nn.Linear(1, 1), (1, 1)),
        "product 17x17x17": lambda: (nn.Linear(17, 17), (17, 17)),
        "product 5x33x65": lambda: (nn.Linear(33, 65), (5, 33)),
        "product 64x64x64": lambda: (nn.Linear(64, 64), (64, 64)),
        "mlp": lambda: (MLP(32, 64), (16, 32)),
        "attention": lambda: (Attention(16, 2, 1), (1, 8, 16)),
        "block": lambda: (Block(16, 2), (1, 8, 16)),
        "convolutions": lambda: (convolutions(), (1, 3, 6, 6)),
        "norm": lambda: (nn.LayerNorm(64), (16, 64)),
        "softmax": lambda: (nn.Softmax(-1), (16, 48)),
    }


def machines() -> dict[str, SpatialMachine]:
    return {
        "1x1": toy(1, 1),
        "2x2": toy(2, 2),
        "1x4, 8 lanes": toy(1, 4, lanes=8),
        "2x2, two banks": toy(2, 2, banks=2, read_ports=2, write_ports=2),
    }


def cases() -> Iterator[tuple[str, Callable[[], SpatialProgram]]]:
    for machine_name, machine in machines().items():
        for model_name, build in models().items():

            def program(build: Callable[[], Model] = build, machine: SpatialMachine = machine) -> SpatialProgram:
                torch.manual_seed(0)
                model, shape = build()
                return map_onto(model, torch.randn(shape), machine=machine, effort="quick")

            yield f"{model_name} on {machine_name}", program


def row(name: str, program: SpatialProgram) -> str:
    return f"{name}  {program.cycles}  {program.bound}  {program.limit}"


def read() -> dict[str, str]:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {line.split("  ")[0]: line for line in lines}


if __name__ == "__main__":
    rows = [row(name, program()) for name, program in cases()]
    TABLE.write_text("\n".join([HEAD, *rows, ""]), encoding="utf-8")
    print(f"wrote {len(rows)} rows")
