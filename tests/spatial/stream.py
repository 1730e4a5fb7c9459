"""Example machines and workloads of Stream (KU Leuven's explorer of multi-core accelerators), stated in our words, and
the cycles of our programs beside its estimates.

    python -m tests.spatial.stream            maps all; a word or two choose some: simba swiglu

Estimates are those of Stream 1.13.14, `tests/golden_metrics.json` of github.com/KULeuven-MICAS/stream at 28fb901 of
August 2026. A machine here has no more of anything: its bus to off-chip memory is cut into equal ports, one a core, its
vector unit into equal shares; the width of its SRAM into four ports. Weights come from off-chip memory as they do
there; those of the convolutions as inputs. What cannot be stated is left out: unrollings that are no array of rows and
columns (Meta's prototype), and memories that two cores share (FuseMax).
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
DRAM = """
[dram]
cores = [{ports}, "{of}"]
size = ["1 GB", "{of}"]
width = ["{dram} B", "{of}: the bus, cut into equal ports"]
latency = [1, "{of}"]
"""


@dataclass(frozen=True)
class Example:
    """A machine of Stream's. `bus` is what off-chip memory gives in a cycle, in bytes, to the cores of the first
    `ports` columns of the first row, or of all."""

    grid: tuple[int, int]
    array: tuple[int, int]
    sram: int  # KiB a core
    port: int  # bytes, a quarter of the width of its memory
    bus: int
    link: int = 4
    top: bool = False  # only the first row reaches off-chip memory

    def machine(self, name: str, streams: bool) -> SpatialMachine:
        """With weights in off-chip memory the bus is shared: a quarter is for inputs and outputs."""
        rows, columns = self.grid
        ports = [[i, j] for i in range(1 if self.top else rows) for j in range(columns)]
        each = self.bus // len(ports)
        words = {
            "name": f"{name}, as Stream has it", "of": f"{STREAM}, {name}.yaml", "grid": list(self.grid),
            "array": self.array, "lanes": 64 // (rows * columns) or 1, "sram": self.sram, "port": self.port,
            "link": self.link, "ports": ports, "host": each // 4 if streams else each, "dram": each - each // 4,
        }  # fmt: skip
        return read(name, (MACHINE + (DRAM if streams else "")).format(**words))


MACHINES = {
    "tpu_like_quad_core": Example((2, 2), (32, 32), 2048, 64, 16),
    "simba_small": Example((2, 2), (32, 32), 256, 32, 16),
    "simba": Example((6, 6), (32, 32), 256, 32, 192, 32, top=True),
    "eyeriss_like_single_core": Example((1, 1), (14, 12), 1096, 24, 8),
    "eyeriss_like_dual_core": Example((1, 2), (14, 12), 1096, 24, 16),
    "eyeriss_like_quad_core": Example((2, 2), (14, 12), 1096, 24, 16),
}


class Convolutions(nn.Module):
    """Two of 3×3 on an image of 32×32, whose channels lie side by side; weights are inputs."""

    def forward(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        y = x.permute(0, 3, 1, 2)
        for w in (first, second):
            y = F.conv2d(y, w.permute(3, 2, 0, 1), padding=1)
        return y.permute(0, 2, 3, 1)


class Gated(nn.Module):
    """The layer behind attention in a Llama, so many of its inner columns at once."""

    def __init__(self, wide: int, inner: int, parts: int) -> None:
        super().__init__()
        each = inner // parts
        self.gate, self.up = (nn.ModuleList(nn.Linear(wide, each, bias=False) for _ in range(parts)) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(each, wide, bias=False) for _ in range(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(down(F.silu(gate(x)) * up(x)) for gate, up, down in zip(self.gate, self.up, self.down, strict=True))


def convolutions(name: str) -> SpatialProgram | ChainProgram:
    x, first, second = (torch.zeros(shape).bfloat16() for shape in ((1, 32, 32, 8), (3, 3, 8, 16), (3, 3, 16, 32)))
    return map_onto(Convolutions(), x, first, second, machine=MACHINES[name].machine(name, False))


def swiglu(name: str, batches: int, parts: int) -> SpatialProgram | ChainProgram:
    model, x = Gated(2048, 8192, parts).bfloat16(), torch.zeros(256, 2048).bfloat16()
    machine = MACHINES[name].machine(name, True)
    return map_onto(model, x, machine=machine, cut={"batches": batches}, effort="quick")


# Machine, workload -> Stream's estimate, and our program.
CASES = {
    ("tpu_like_quad_core", "convolutions"): (14_344, convolutions),
    ("simba_small", "convolutions"): (10_750, convolutions),
    ("simba", "convolutions"): (4_316, convolutions),
    ("eyeriss_like_single_core", "convolutions"): (114_999, convolutions),
    ("eyeriss_like_dual_core", "convolutions"): (76_675, convolutions),
    ("eyeriss_like_quad_core", "convolutions"): (41_961, convolutions),
    ("tpu_like_quad_core", "swiglu"): (103_546_916, lambda name: swiglu(name, 2, 8)),
}


def main(words: list[str]) -> None:
    ratios = []
    for (name, workload), (estimate, mapped) in CASES.items():
        if all(word in f"{name} {workload}" for word in words):
            torch.manual_seed(0)
            started = time.process_time()
            program = mapped(name)
            assert cost(program).cycles == program.cycles
            ratios.append(program.cycles / estimate)
            seconds = time.process_time() - started
            print(
                f"{name:<26}{workload:<14}{program.cycles:>12,}{estimate:>14,}{ratios[-1]:>8.3f}"
                f"   bound {program.bound:,} ({program.reasons[0]})  {seconds:.1f} s",
                flush=True,
            )
    print(f"geometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f} of {len(ratios)}")


if __name__ == "__main__":
    main(sys.argv[1:])
