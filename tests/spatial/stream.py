"""Example machines and a workload of Stream (KU Leuven's explorer of multi-core accelerators), stated in our words, and
the cycles of our programs beside its estimates.

    python -m tests.spatial.stream            maps all; a word chooses some: simba

Estimates are those of Stream 1.13.14, `tests/golden_metrics.json` of github.com/KULeuven-MICAS/stream at 28fb901 of
August 2026. The bus to off-chip memory is cut into equal ports, one a core; the vector unit into equal shares; the
width of each SRAM into four ports. Weights are inputs, since there they come over the bus too. The narrower port of the
memory behind the bus is left out here as in its estimates, some of which move more than that would let through. What
cannot be stated is left out: unrollings that are no array of rows and columns (Meta's prototype), and memories that two
cores share (FuseMax).
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tessera.machines.spatial import SpatialMachine, read
from tessera.spatial.chain.api import ChainProgram
from tessera.spatial.map import map_onto
from tessera.spatial.program import SpatialProgram
from tessera.spatial.simulator.api import cost

STREAM = "Stream 1.13.14 (2026)"
MACHINE = """
name = "{name}"
kind = "spatial"
[chip]
clock = ["1 GHz", "assumed: cycles alone are compared"]
grid = [{grid}, "{of}"]
[matrix]
rows = [{array[0]}, "{of}"]
columns = [{array[1]}, "{of}"]
count = [1, "{of}"]
stationary = ["weight", "assumed: there each layer may have its own"]
loading = ["overlapped", "assumed: registers hold several weights"]
passes = [{{ bfloat16 = 1 }}, "{of}"]
[vector]
lanes = [{lanes}, "{of}: 64 lanes for all cores"]
cycles = [{{ default = 1 }}, "assumed: as there"]
[sram]
size = ["{sram} KiB", "{of}"]
banks = [8, "assumed: enough"]
read_ports = [4, "assumed: the width there in four"]
write_ports = [4, "assumed: the width there in four"]
width = ["{port} B", "{of}"]
align = ["{port} B", "assumed: a port's width"]
[copy]
engines = [1, "assumed: one a core"]
[link]
topology = ["mesh", "{of}"]
width = ["{link} B", "{of}"]
latency = [1, "assumed: it counts none"]
jitter = [0, "assumed: it counts none"]
reduce = [false, "{of}"]
[host]
cores = [{ports}, "{of}"]
width = ["{host} B", "{of}: the bus, cut into equal ports"]
"""


@dataclass(frozen=True)
class Example:
    """A machine of Stream's, and what it estimates there. `bus` is the bytes that go to off-chip memory and come from
    it in a cycle."""

    estimate: int
    grid: tuple[int, int]
    array: tuple[int, int]
    sram: int  # KiB a core
    port: int  # bytes, a quarter of the width of its memory
    bus: int
    link: int = 4
    top: bool = False  # the first row alone reaches off-chip memory

    def machine(self, name: str) -> SpatialMachine:
        rows, columns = self.grid
        ports = [[i, j] for i in range(1 if self.top else rows) for j in range(columns)]
        words = {
            "name": f"{name}, as Stream has it", "of": f"{STREAM}, {name}.yaml", "grid": list(self.grid),
            "array": self.array, "lanes": 64 // (rows * columns) or 1, "sram": self.sram, "port": self.port,
            "link": self.link, "ports": ports, "host": self.bus // len(ports),
        }  # fmt: skip
        return read(name, MACHINE.format(**words))


MACHINES = {
    "tpu_like_quad_core": Example(14_344, (2, 2), (32, 32), 2048, 64, 16),
    "simba_small": Example(10_750, (2, 2), (32, 32), 256, 32, 16),
    "simba": Example(4_316, (6, 6), (32, 32), 256, 32, 192, 32, top=True),
    "eyeriss_like_single_core": Example(114_999, (1, 1), (14, 12), 1096, 24, 8),
    "eyeriss_like_dual_core": Example(76_675, (1, 2), (14, 12), 1096, 24, 16),
    "eyeriss_like_quad_core": Example(41_961, (2, 2), (14, 12), 1096, 24, 16),
}


class Convolutions(nn.Module):
    """Two of 3×3 on an image of 32×32, whose channels lie side by side; weights are inputs."""

    def forward(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        y = x.permute(0, 3, 1, 2)
        for w in (first, second):
            y = F.conv2d(y, w.permute(3, 2, 0, 1), padding=1)
        return y.permute(0, 2, 3, 1)


def mapped(name: str) -> SpatialProgram | ChainProgram:
    x, first, second = (torch.zeros(shape).bfloat16() for shape in ((1, 32, 32, 8), (3, 3, 8, 16), (3, 3, 16, 32)))
    return map_onto(Convolutions(), x, first, second, machine=MACHINES[name].machine(name))


def main(words: list[str]) -> None:
    ratios = []
    for name, example in MACHINES.items():
        if all(word in name for word in words):
            started = time.process_time()
            program = mapped(name)
            assert cost(program).cycles == program.cycles
            ratios.append(program.cycles / example.estimate)
            print(
                f"{name:<26}{program.cycles:>10,}{example.estimate:>10,}{ratios[-1]:>8.3f}"
                f"   bound {program.bound:,} ({program.reasons[0]})  {time.process_time() - started:.1f} s",
                flush=True,
            )
    print(f"geometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f} of {len(ratios)}")


if __name__ == "__main__":
    main(sys.argv[1:])
