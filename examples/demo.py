"""Train a small GPT to add, three ways side by side: eager PyTorch, torch.compile, and Tessera.

The text is sums such as `3+4=07;`. The two summands are random and the rest follows from them, so a model
that has understood addition reaches a known loss, which is printed as the floor. All three start from the
same weights and see the same batches: what differs is the time. At the end the trained model answers a few
sums, and one block of it is shown as the program Tessera runs.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from rich.console import Console
from rich.progress import Progress
from rich.syntax import Syntax
from rich.table import Table
from torch import Tensor

import tessera
from tessera.tools.machine import cxx_compiler, machine
from tessera.tools.models import GPT, GPTConfig

CHARACTERS = "0123456789+=;"
SUM_LENGTH = len("3+4=07;")
SUMS_IN_A_ROW = 8
BATCH = 32
STEPS = 300
FLOOR = 2 * math.log(10) / SUM_LENGTH  # only the two summands carry information

CONFIG = GPTConfig(layers=3, width=96, heads=4, context=SUM_LENGTH * SUMS_IN_A_ROW, vocab=len(CHARACTERS))
PEER = "inductor" if cxx_compiler() else "aot_eager"
CONTESTANTS: dict[str, Callable[[GPT], Callable[..., Tensor]]] = {
    "eager": lambda model: model,
    f"torch.compile ({PEER})": lambda model: torch.compile(model, backend=PEER),
    "tessera": lambda model: tessera.jit(model),
}


@dataclass(frozen=True)
class Run:
    """What one contestant did."""

    model: GPT
    first_call: float
    step: float
    loss: float


def encode(text: str) -> list[int]:
    """Characters to token ids."""
    return [CHARACTERS.index(c) for c in text]


def batch(generator: torch.Generator) -> Tensor:
    """Token ids `(BATCH, context + 1)`: inputs and, one to the right, targets."""
    pairs = torch.randint(10, (BATCH, SUMS_IN_A_ROW + 1, 2), generator=generator).tolist()
    lines = ["".join(f"{a}+{b}={a + b:02d};" for a, b in row) for row in pairs]
    return torch.tensor([encode(line[: CONFIG.context + 1]) for line in lines])


def train(model: GPT, compile_: Callable[[GPT], Callable[..., Tensor]], tick: Callable[[], None]) -> Run:
    """Train `model` in place through its compiled form, timing the first step apart from the others."""
    fast = compile_(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=STEPS)
    generator = torch.Generator().manual_seed(1)
    times, losses = [], []
    for _ in range(STEPS):
        tokens = batch(generator)
        start = time.perf_counter()
        loss = fast(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        schedule.step()
        losses.append(loss.item())
        tick()
    return Run(model, times[0], median(times[1:]), sum(losses[-20:]) / 20)


@torch.no_grad()
def answer(model: GPT, a: int, b: int) -> str:
    """What the model writes after `a+b=`, two digits, greedily."""
    tokens = encode(f"{a}+{b}=")
    for _ in range(2):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return "".join(CHARACTERS[t] for t in tokens)


def main() -> None:
    """Train, compare, answer, and show a program."""
    console = Console()
    console.print(f"[bold]Tessera[/bold] on {machine()}")
    torch.compiler.config.force_disable_caches = True  # a first step is first for everyone
    torch.manual_seed(0)
    model = GPT(CONFIG)
    runs: dict[str, Run] = {}
    with Progress(console=console) as progress:
        for name, compile_ in CONTESTANTS.items():
            task = progress.add_task(name, total=STEPS)
            runs[name] = train(copy.deepcopy(model), compile_, lambda task=task: progress.advance(task))

    table = Table("", "first step", "steady step", "vs eager", f"loss (floor {FLOOR:.3f})")
    for name, run in runs.items():
        speed = f"{runs['eager'].step / run.step:.2f} x"
        table.add_row(name, f"{run.first_call:.2f} s", f"{run.step * 1e3:.2f} ms", speed, f"{run.loss:.3f}")
    console.print(table)
    console.print("It adds:", "  ".join(answer(runs["tessera"].model, a, b) for a, b in [(3, 4), (9, 8), (0, 6)]))

    block = tessera.jit(runs["tessera"].model.blocks[0])
    with torch.no_grad():  # the forward program alone
        block(torch.randn(1, CONFIG.context, CONFIG.width))
    console.print("\nOne block of it, as Tessera runs it:")
    console.print(Syntax(str(tessera.stages(block)[-1]), "python"))


if __name__ == "__main__":
    main()
