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
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

import torch
from rich.console import Console
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
SECONDS = 75.0  # of training; a slow machine takes fewer steps, and may end before it has learned to add
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


@dataclass
class Training:
    """How far the training is: it ends after so many steps, or when its time is over."""

    steps: int
    seconds: float
    taken: int = 0
    begun: float = 0.0  # after the first steps, which compile

    @property
    def done(self) -> float:
        over = (time.perf_counter() - self.begun) / self.seconds if self.begun else 0.0
        return min(max(self.taken / self.steps, over), 1.0)

    def rounds(self) -> Iterator[int]:
        while self.done < 1 or self.taken < 2:
            yield self.taken
            self.taken += 1
            self.begun = self.begun or time.perf_counter()


def contestant(model: GPT, compile_: Callable[[GPT], Callable] | None, training: Training) -> Contestant:
    """A copy of the model, trained through `compile_(model)`, or as one program, fused, where that is None."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 - 0.99 * training.done)
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
    """What the model writes after `a+b=`, two digits, greedily, and whether that is so."""
    tokens = encode(f"{a}+{b}=")
    for _ in range(2):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    text = "".join(CHARACTERS[t] for t in tokens)
    return text if text == f"{a}+{b}={a + b:02d}" else f"{text} (wrong)"


def show_block(model: GPT, console: Console) -> None:
    """One block's program, without types where the terminal has no room for them."""
    block = tessera.jit(model.blocks[0])
    with torch.no_grad():  # the forward program alone
        block(torch.randn(1, CONFIG.context, CONFIG.width))
    program = str(tessera.stages(block)[-1].trace)
    if console.width < 160:
        program = re.sub(r"\n    # .*|  +#.*", "", program)
    console.print("\nOne block of it, as Tessera runs it:")
    for line in program.rstrip().splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        console.print(Syntax("\n".join(_wrapped(line, console.width, indent)), "python", background_color="default"))


def _wrapped(line: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, drop_whitespace=False) or [""]


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
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each, at most (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of training, at most (default: %(default)s)")
    peers = ("inductor", "aot_eager")
    default = peers[0] if cxx_compiler() else peers[1]
    parser.add_argument("--peer", choices=peers, default=default, help="torch.compile's backend (default: %(default)s)")
    made = parser.parse_args()
    if made.steps < 2:
        parser.error("--steps: expected at least 2, the first and another")
    return made


def train(runs: dict[str, Contestant], training: Training, console: Console) -> None:
    """Step all of them in turn. The first steps compile; afterwards the console is told how far it is."""
    generator = torch.Generator().manual_seed(1)
    told = 0
    for taken in training.rounds():
        tokens = batch(generator)
        for name, run in runs.items():
            if not taken:
                console.print(f"first step of {name} …")
            run.train(tokens)
        if int(training.done * 4) > told:
            told = int(training.done * 4)
            console.print(f"step {taken + 1}: loss {runs[STEP].losses[-1]:.2f}, {training.done:.0%} of the training")


def main() -> None:
    """Train, compare, answer, and show a program."""
    args, console = arguments(), Console()
    console.print(f"[bold]Tessera[/bold] on {machine()}")
    warnings.filterwarnings("ignore", message="dynamo_pgo")
    torch.compiler.config.force_disable_caches = True  # a first step is first for everyone
    torch.manual_seed(0)
    model = GPT(CONFIG)
    training = Training(args.steps, args.seconds)
    ways = {
        "eager": lambda model: model,
        f"torch.compile, {args.peer}": lambda model: torch.compile(model, backend=args.peer),
        "tessera.jit": tessera.jit,
        STEP: None,
    }
    runs = {name: contestant(model, way, training) for name, way in ways.items()}
    train(runs, training, console)

    console.print(results(runs))
    trained = runs[STEP]
    console.print(
        f"After {training.taken} steps it adds:",
        "  ".join(answer(trained.model, a, b) for a, b in [(3, 4), (9, 8), (0, 6)]),
    )
    show_block(trained.model, console)
    tessera.report(trained.step, REPORT)
    console.print(f"\n{REPORT}            the whole step: source, program and kernels side by side")
    console.print("examples/tour.py       every stage of a ten-line model")
    console.print("docs/quickstart.md     what to type next")


if __name__ == "__main__":
    main()
