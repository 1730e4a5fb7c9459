"""Random programs on random machines: what the simulator gives is PyTorch's answer, and nothing is refused but for
space.

`python -m tests.spatial.random_programs 1000` tries that many; a second number is the first seed.
"""

from __future__ import annotations

import random
import sys

import torch
import torch.nn.functional as F
from torch import nn

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.errors import SpaceError
from tessera.spatial.map import map_onto
from tessera.spatial.simulator.api import simulate
from tests.spatial.nets import toy


def random_machine(chance: random.Random) -> SpatialMachine:
    down, across = chance.choice([(1, 1), (1, 2), (2, 2), (1, 4), (3, 2), (3, 3)])
    extra = ""
    if down == 3 and across == 3 and chance.random() < 0.5:
        extra = '\n[dead]\ncores = [[[1, 1]], "assumed: one is dead"]\n'
    banks, size = chance.choice([1, 2, 4]), "64 KiB"
    if chance.random() < 0.4:  # off-chip memory, and where it is needed often: little of the core's own
        size = chance.choice(["2 KiB", "4 KiB", "8 KiB", "64 KiB"])
        extra += _dram(chance, down, across)
    return toy(
        down, across, extra,
        rows=chance.choice([2, 4, 8, 16]), columns=chance.choice([4, 8, 16]), lanes=chance.choice([4, 16, 32]),
        stationary=f'"{chance.choice(["weight", "input", "output"])}"',
        loading=f'"{chance.choice(["serial", "overlapped"])}"',
        size=f'"{size}"', banks=banks, read_ports=chance.choice([1, 2, 3]), write_ports=chance.choice([1, 2]),
        topology=f'"{chance.choice(["mesh", "torus"])}"', latency=chance.choice([1, 2, 5]),
        jitter=chance.choice([0, 0, 2]),
        engines=chance.choice([0, 1, 2]),
    )  # fmt: skip


def _dram(chance: random.Random, down: int, across: int) -> str:
    ports = sorted({(0, 0), (down - 1, chance.randrange(across))})
    return f"""
[dram]
cores = [{[list(port) for port in ports]}, "assumed: some"]
size = ["64 KiB", "assumed: enough"]
width = ["{chance.choice([3, 16, 64])} B", "assumed: of several"]
latency = [{chance.choice([0, 1, 30])}, "assumed: of several"]
"""


class Program(nn.Module):
    """Steps drawn at random; every one gives a matrix or a stack of them."""

    def __init__(self, chance: random.Random, width: int) -> None:
        super().__init__()
        self.steps = [chance.choice(STEPS) for _ in range(chance.randrange(1, 6))]
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=chance.random() < 0.5) for _ in self.steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step, layer in zip(self.steps, self.layers, strict=True):
            x = step(x, layer)
        return x


def _attention(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, layer(x), x, is_causal=x.ndim > 2)


STEPS = [
    lambda x, layer: layer(x),
    lambda x, layer: x + F.gelu(layer(x)),
    lambda x, layer: torch.softmax(x, -1),
    lambda x, layer: torch.softmax(x, 0) * x,
    lambda x, layer: F.layer_norm(x, x.shape[-1:]),
    lambda x, layer: F.rms_norm(x, x.shape[-1:]) + x.mean(-1, keepdim=True),
    lambda x, layer: torch.cat([x[..., 1:], x[..., :1] * 2], -1),
    lambda x, layer: torch.where(x > x.amax(0, keepdim=True) / 2, x, -x),
    lambda x, layer: torch.tanh(x).flip(0) + x.sum(0),
    lambda x, layer: torch.roll(x, 1, -1).clamp(-2, 2),
    lambda x, layer: x.transpose(0, -1).reshape(x.shape) * 0.5,
    lambda x, layer: F.pad(x, (1, 0))[..., :-1] + layer(x),
    _attention,
]


def attempt(seed: int) -> str:
    """Empty where all is well; otherwise what is not."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    machine, width = random_machine(chance), chance.choice([1, 3, 8, 17, 24])
    shape = (*chance.choice([(), (2,), (3,)]), chance.choice([1, 2, 5, 17]), width)
    model, x = Program(chance, width).double(), torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
    try:
        program = map_onto(model, x, machine=machine, effort=chance.choice(["quick", "normal"]), seed=seed % 3)
    except SpaceError:
        return ""
    run = simulate(program, x)
    if run.cycles != program.cycles or not program.cycles >= program.bound >= program.limit:
        return f"{seed}: {run.cycles} cycles simulated; scheduled {program.cycles}, {program.bound}, {program.limit}"
    if not torch.allclose(run.output, expected, rtol=1e-10, atol=1e-10):
        return f"{seed}: off by {(run.output - expected).abs().max():.3g} on {machine.key}"
    return ""


if __name__ == "__main__":
    wrong = 0
    count, first = (int(arg) for arg in (*sys.argv[1:], "0")[:2])
    for number in range(first, first + count):
        try:
            problem = attempt(number)
        except Exception as error:  # every failure is counted and told
            problem = f"{number}: {type(error).__name__}: {error}"
        if problem:
            wrong += 1
            print(problem, flush=True)
    print(f"{count} programs, {wrong} wrong")
    sys.exit(bool(wrong))
