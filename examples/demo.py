"""Train a small GPT to add, four ways side by side: eager PyTorch, torch.compile, and Tessera twice.

The text is sums such as `3+4=07;`. The two summands are random and the rest follows from them, so a model that has
understood addition reaches a known loss, the least there is. All start from the same weights and see the
same batches, step by step in turn, so that a machine that is busy for a while is busy for all of them: what differs is
the time. At the end the trained model answers a few sums, one block of it is shown as the program Tessera runs, and
`report.html` shows the whole training program.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.syntax import Syntax
from rich.table import Column, Table
from torch import Tensor

import tessera
from tessera.tools.machine import cxx_compiler, machine
from tessera.tools.models import GPT, GPTConfig

CHARACTERS = "0123456789+=;"
SUM_LENGTH = len("3+4=07;")
SUMS_IN_A_ROW = 8
BATCH = 32
STEPS = 240
FLOOR = 2 * math.log(10) / SUM_LENGTH  # only the two summands carry information
REPORT = "report.html"
STEP = "tessera.train_step, fused"
FUSED = ["sdpa", "tile", "aten"]  # attention by PyTorch, regions by kernels of our own, the rest by PyTorch

CONFIG = GPTConfig(layers=3, width=96, heads=4, context=SUM_LENGTH * SUMS_IN_A_ROW, vocab=len(CHARACTERS))


@dataclass
class Contestant:
    """A model of its own, how it is stepped, and what that took."""

    model: GPT
    step: Callable[[Tensor, Tensor], Tensor]
    schedule: torch.optim.lr_scheduler.LRScheduler
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def train(self, tokens: Tensor) -> None:
        start = time.perf_counter()
        loss = self.step(tokens[:, :-1], tokens[:, 1:])
        self.times.append(time.perf_counter() - start)
        self.schedule.step()
        self.losses.append(loss.item())

    @property
    def loss(self) -> float:
        last = self.losses[-20:]
        return sum(last) / len(last)


def contestant(model: GPT, compile_: Callable[[GPT], Callable] | None, steps: int) -> Contestant:
    """A copy of the model, trained through `compile_(model)`, or as one program, fused, where that is None."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=steps)
    if compile_ is None:
        return Contestant(model, tessera.train_step(model, None, optimizer, executors=FUSED), schedule)
    fast = compile_(model)

    def step(idx: Tensor, targets: Tensor) -> Tensor:
        loss = fast(idx, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Contestant(model, step, schedule)


def encode(text: str) -> list[int]:
    """Characters to token ids."""
    return [CHARACTERS.index(c) for c in text]


def batch(generator: torch.Generator) -> Tensor:
    """Token ids `(BATCH, context + 1)`: inputs and, one to the right, targets."""
    pairs = torch.randint(10, (BATCH, SUMS_IN_A_ROW + 1, 2), generator=generator).tolist()
    lines = ["".join(f"{a}+{b}={a + b:02d};" for a, b in row) for row in pairs]
    return torch.tensor([encode(line[: CONFIG.context + 1]) for line in lines])


@torch.no_grad()
def answer(model: GPT, a: int, b: int) -> str:
    """What the model writes after `a+b=`, two digits, greedily."""
    tokens = encode(f"{a}+{b}=")
    for _ in range(2):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return "".join(CHARACTERS[t] for t in tokens)


def show_block(model: GPT, console: Console) -> None:
    """One block's program, without types where the terminal has no room for them."""
    block = tessera.jit(model.blocks[0])
    with torch.no_grad():  # the forward program alone
        block(torch.randn(1, CONFIG.context, CONFIG.width))
    program = str(tessera.stages(block)[-1].trace)
    if console.width < 160:
        program = re.sub(r"\n    # .*|  +#.*", "", program)
    console.print("\nOne block of it, as Tessera runs it:")
    console.print(Syntax(program.rstrip(), "python", word_wrap=True))


def results(runs: dict[str, Contestant]) -> Table:
    """What each took, side by side."""
    table = Table(Column("", no_wrap=True), "first step", "steady step", "vs eager", f"loss (least {FLOOR:.2f})")
    steady = {name: median(run.times[1:]) for name, run in runs.items()}
    for name, run in runs.items():
        speed = f"{steady['eager'] / steady[name]:.2f} x"
        table.add_row(name, f"{run.times[0]:.2f} s", f"{steady[name] * 1e3:.1f} ms", speed, f"{run.loss:.3f}")
    return table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT to add, four ways side by side.")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each (default: %(default)s)")
    peers = ("inductor", "aot_eager")
    default = peers[0] if cxx_compiler() else peers[1]
    parser.add_argument("--peer", choices=peers, default=default, help="torch.compile's backend (default: %(default)s)")
    made = parser.parse_args()
    if made.steps < 2:
        parser.error("--steps: expected at least 2, the first and another")
    return made


def main() -> None:
    """Train, compare, answer, and show a program."""
    args, console = arguments(), Console()
    console.print(f"[bold]Tessera[/bold] on {machine()}")
    warnings.filterwarnings("ignore", message="dynamo_pgo")
    torch.compiler.config.force_disable_caches = True  # a first step is first for everyone
    torch.manual_seed(0)
    model = GPT(CONFIG)
    runs = {
        "eager": contestant(model, lambda model: model, args.steps),
        f"torch.compile, {args.peer}": contestant(
            model, lambda model: torch.compile(model, backend=args.peer), args.steps
        ),
        "tessera.jit": contestant(model, tessera.jit, args.steps),
        STEP: contestant(model, None, args.steps),
    }
    generator = torch.Generator().manual_seed(1)
    for _ in track(range(args.steps), "training", console=console):
        tokens = batch(generator)
        for run in runs.values():
            run.train(tokens)

    console.print(results(runs))
    trained = runs[STEP]
    console.print("It adds:", "  ".join(answer(trained.model, a, b) for a, b in [(3, 4), (9, 8), (0, 6)]))
    show_block(trained.model, console)
    tessera.report(trained.step, REPORT)
    console.print(f"\n{REPORT}            the whole step: source, program and kernels side by side")
    console.print("examples/tour.py       every stage of a ten-line model")
    console.print("docs/quickstart.md     what to type next")


if __name__ == "__main__":
    main()
