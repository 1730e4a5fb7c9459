"""`tessera bench spatial`: how near programs for spatial machines come to what is possible, and what mapping costs.

Cycles, bounds and limits are exact and the same on every computer; only the seconds are measured. The machine is made
up: a grid of cores with arrays of 128 × 128, each number assumed.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import nn

from tessera.machines.find import spatial_machine
from tessera.machines.spatial import SpatialMachine, read
from tessera.spatial.map import map_onto
from tessera.spatial.simulator.api import cost
from tessera.spatial.simulator.judge import judge
from tessera.tools.bench.report import Outcome
from tessera.tools.bench.spatial_models import Attention, Experts, Layers, Llama, LlamaBlock, without_memory

Say = Callable[[str], None]
MACHINE = """
name = "a grid of cores with arrays of 128×128"
kind = "spatial"
[chip]
clock = ["1 GHz", "assumed: round"]
grid = [[{side}, {side}], "assumed: square"]
[matrix]
rows = [128, "assumed: as a TPU's"]
columns = [128, "assumed: as a TPU's"]
count = [1, "assumed: one a core"]
stationary = ["weight", "assumed: as in a TPU"]
loading = ["overlapped", "assumed: as in a TPU"]
passes = [{{ bfloat16 = 1, float32 = 4 }}, "assumed: by their bits"]
[vector]
lanes = [256, "assumed: two rows of the array"]
cycles = [{{ default = 1 }}, "assumed: all alike"]
[sram]
size = ["16 MiB", "assumed: weights and what is computed"]
banks = [16, "assumed: a MiB each"]
read_ports = [4, "assumed: array, vector unit, copy engine, links"]
write_ports = [4, "assumed: as many as read"]
width = ["256 B", "assumed: a row of the array"]
align = ["256 B", "assumed: a port's width"]
[copy]
engines = [1, "assumed: one a core"]
[link]
topology = ["torus", "assumed: four neighbours"]
width = ["256 B", "assumed: a port's width"]
latency = [1, "assumed: a hop"]
jitter = [0, "assumed: synchronous"]
reduce = [false, "assumed: plain links"]
[host]
cores = [{hosts}, "assumed: both edges"]
width = ["256 B", "assumed: as a link"]
"""


def grid(side: int) -> SpatialMachine:
    hosts = [[row, column] for row in range(side) for column in (0, side - 1)]
    return read(f"grid{side}x{side}", MACHINE.format(side=side, hosts=hosts))


class Product(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


class Block(nn.Module):
    """A block of GPT."""

    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.qkv, self.o = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.mlp = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, wide = x.shape
        parts = self.qkv(self.ln_1(x)).split(wide, -1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, wide))
        return x + self.mlp(self.ln_2(x))


class Residual(nn.Module):
    """Two convolutions of a ResNet-18, with their norms and the sum."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(wide, wide, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.other(self.second(torch.relu(self.norm(self.first(x))))))


class ChannelsLast(nn.Module):
    """Blocks on images whose channels lie side by side, as the machine reads them."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


@dataclass(frozen=True)
class Case:
    """A model in bfloat16, the shape of its input, the side of the grid, and at most how many times the bound. With
    chips it runs on so many of an LPX instead. Where the aim is throughput, the interval between runs is held against
    what the busiest resource takes of each."""

    title: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    side: int
    at_most: float
    chips: int = 1
    cut: Mapping[str, int] | None = None
    further: tuple[torch.Tensor, ...] = ()
    effort: str = "normal"
    aim: str = "latency"


def llama(title: str, rows: int, chips: int, at_most: float) -> Case:
    block = lambda: LlamaBlock(rows, 8192, 64, 8, 28672, 1024)  # noqa: E731
    effort = "normal" if chips <= 8 else "quick"  # thousands of cores: one mapping takes minutes
    return Case(title, block, (rows, 8192), 0, at_most, chips, further=(torch.tensor([1000]),), effort=effort)


SECTIONS: dict[str, Case] = {
    "product": Case("product 4096³, 64 cores", lambda: Product(4096), (4096, 4096), 8, 1.08),
    "gpt16": Case("GPT block, 512 tokens, d 1024, 16 cores", lambda: Block(1024, 16), (1, 512, 1024), 4, 1.2),
    "gpt64": Case("the same, 64 cores", lambda: Block(1024, 16), (1, 512, 1024), 8, 1.35),
    "resnet": Case(
        "two ResNet-18 blocks at 56×56, 16 cores", lambda: ChannelsLast(Residual(64), Residual(64)), (1, 56, 56, 64), 4,
        1.35,
    ),
    "llama8": llama("Llama-70B block, 1 row, 8 chips", 1, 8, 1.4),
    "llama8rows": llama("the same, 8 rows", 8, 8, 1.4),
    "llama64": llama("Llama-70B block, 1 row, 64 chips", 1, 64, 1.8),
    "llama64rows": llama("the same, 8 rows", 8, 64, 1.8),
    "attention": Case(
        "decode attention, 8 heads of KV, 8k, 8 chips", lambda: Attention(1, 8192, 64, 8, 8192), (1, 8192), 0, 1.3, 8,
        further=(torch.tensor([8000]),),
    ),
    "experts": Case(
        "MoE layer, 2 of 8, 4 rows, 8 chips", lambda: Experts(4096, 14336, 8, 2), (4, 4096), 0, 1.6, 8
    ),
    "pipeline": Case(
        "16-stage pipeline", lambda: Layers(16, 1024), (64, 1024), 0, 1.05, 16, {"pipeline": 16}, effort="quick",
        aim="throughput",
    ),
    "llama70b": Case(
        "all of Llama-70B, 1 row, 256 chips", lambda: whole_llama(80), (), 0, 2.0, 256,
        {"tensor": 16, "pipeline": 16, "blocks": 80}, (torch.tensor([5]), torch.tensor([1000])),
    ),
    "llama70b8": Case(
        "eight blocks of it, 32 chips", lambda: whole_llama(8), (), 0, 2.0, 32,
        {"tensor": 16, "pipeline": 2, "blocks": 8}, (torch.tensor([5]), torch.tensor([1000])),
    ),
}  # fmt: skip


def whole_llama(blocks: int) -> nn.Module:
    return without_memory(lambda: Llama(blocks, 1, 8192, 64, 8, 28672, 1024, 128256))


def in_bfloat16(model: nn.Module) -> nn.Module:
    """Weights of more bits; those of eight stay as they are."""
    return model._apply(lambda t: t.bfloat16() if t.dtype == torch.float32 and t.ndim else t)


def measure_chain(name: str, case: Case) -> dict[str, object]:
    """A model of equal blocks, likewise."""
    model = case.model().eval()
    started = time.process_time()
    chain = map_onto(model, *case.further, machine="lpx", chips=case.chips, cut=case.cut)
    mapped = time.process_time()
    simulated = cost(chain).cycles
    lines = sum(len(page.instructions) for part in chain.chain.parts.values() for page in part.pages)
    return {
        "case": name, "title": case.title, "cycles": chain.cycles, "simulated": simulated, "bound": chain.bound,
        "limit": chain.limit, "ratio": chain.cycles / chain.bound, "at_most": case.at_most,
        "reason": f"a result every {chain.interval:,} cycles", "seconds": mapped - started,
        "judged": time.process_time() - mapped, "instructions": lines,
    }  # fmt: skip


def measure(name: str, case: Case) -> dict[str, object]:
    """A case mapped, scheduled, and judged by the simulator, which must agree on its length."""
    if "blocks" in (case.cut or {}):
        return measure_chain(name, case)
    torch.manual_seed(0)
    model, x = in_bfloat16(case.model().eval()), torch.randn(case.shape).bfloat16()
    machine = grid(case.side) if case.side else spatial_machine("lpx")
    started = time.process_time()
    program = map_onto(
        model, x, *case.further, machine=machine, chips=case.chips, cut=case.cut, aim=case.aim, effort=case.effort
    )
    seconds = time.process_time() - started
    started = time.process_time()
    judged = judge(program.listing, program.machine)
    assert program.mapping is not None
    reached, least = program.cycles, float(program.bound)
    if (every := program.mapping.least_interval) is not None:
        reached, least = program.interval, float(every.cycles)
    return {
        "case": name,
        "title": case.title,
        "cycles": program.cycles,
        "simulated": judged.report.cycles,
        "bound": program.bound,
        "limit": program.limit,
        "ratio": reached / least,
        "at_most": case.at_most,
        "reason": program.reasons[0],
        "seconds": seconds,
        "judged": time.process_time() - started,
        "instructions": sum(len(page.instructions) for page in program.listing.pages),
    }


def outcome(args: Namespace, say: Say) -> Outcome:
    rows = []
    for name in args.only or SECTIONS:
        say(SECTIONS[name].title)
        rows.append(measure(name, SECTIONS[name]))
    missed = any(row["ratio"] > row["at_most"] or row["cycles"] != row["simulated"] for row in rows)
    return Outcome("one thread; CPU seconds", shown(rows), rows, missed)


def shown(rows: list[dict[str, object]]) -> Table:
    table = Table(title="tessera bench spatial")
    for column in ("case", "cycles", "bound", "limit", "× bound", "at most", "at fault", "map s", "judge s", "lines"):
        table.add_column(column, justify="left" if column in ("case", "at fault") else "right")
    for r in rows:
        table.add_row(
            str(r["title"]), f"{r['cycles']:,}", f"{r['bound']:,}", f"{r['limit']:,}", f"{r['ratio']:.3f}",
            f"{r['at_most']}", str(r["reason"]), f"{r['seconds']:.1f}", f"{r['judged']:.1f}", f"{r['instructions']:,}",
        )  # fmt: skip
    return table
