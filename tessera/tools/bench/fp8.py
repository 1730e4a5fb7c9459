"""`tessera bench fp8`: training in 8 bits beside training in 16, its speed and what it learns.

`step`: whole steps of a Llama (forward, backward, AdamW), in eager PyTorch, in Tessera with 16 bits and with each way
to scale 8, and in torchao's float8 under TorchInductor where that is installed. `loss`: a small GPT learns a random
language for 500 steps from the same beginning, over the same batches; the losses of 8 bits stand beside those of 16.
`--quick` runs those alone that the bars compare. `--tiny` has sizes for a CPU, which say nothing about speed.
"""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from statistics import mean, median

import torch
from rich.table import Table
from torch import Tensor, nn

import tessera
from tessera.tools.bench.measure import dead, interleave, ratio, short, tidy, timed_block
from tessera.tools.bench.model_contestants import ours
from tessera.tools.bench.report import Outcome
from tessera.tools.command import chosen_device
from tessera.tools.llama import Llama, LlamaConfig
from tessera.tools.models import GPT, GPTConfig

SECTIONS = ("step", "loss")
F32, BF16, EIGHT = "tessera f32", "tessera bf16", "tessera fp8"
EAGER, TORCHAO = "eager bf16", "torchao fp8"
AT_MOST = 0.75  # times our own step in 16 bits
CLOSE = 0.01  # how far a loss may be from that of 16 bits
STEPS, WINDOW = 500, 50  # losses are compared as means of so many steps
RATE, WARMUP = 1e-3, 50  # the rate rises over so many steps, as trainings begin: the first steps are chaos otherwise
Step = Callable[..., object]


@dataclass(frozen=True)
class Sizes:
    llama: LlamaConfig
    tokens: tuple[int, int]
    gpt: GPTConfig
    batch: int
    smallest: int
    repeat: int


FULL = Sizes(
    LlamaConfig(layers=4, width=4096, heads=32, kv_heads=8, hidden=14336), (2, 4096),
    GPTConfig(layers=6, width=512, heads=8, context=256), 16, 512, 4,
)  # fmt: skip
TINY = Sizes(
    LlamaConfig(layers=2, width=64, heads=4, kv_heads=2, hidden=128, vocab=96), (2, 32),
    GPTConfig(layers=2, width=32, heads=2, context=16, vocab=64), 4, 16, 1,
)  # fmt: skip


def recipes(smallest: int, quick: bool = False) -> dict[str, tessera.FP8 | None]:
    """`quick`: those alone that the bars compare."""
    compared = {BF16: None, EIGHT: tessera.FP8(smallest=smallest)}
    if quick:
        return compared
    return compared | {
        f"{EIGHT} delayed": tessera.FP8(smallest=smallest, history="delayed"),
        f"{EIGHT} row": tessera.FP8(smallest=smallest, scaling="row"),
    }


def outcome(args: Namespace, say: Callable[[str], None]) -> Outcome:
    device = chosen_device(args, "try --device cpu --tiny")
    sizes = TINY if args.tiny or device == "cpu" else FULL
    chosen = args.only or SECTIONS
    rows = list(speed(sizes, device, args.rounds or 5, args.quick, say)) if "step" in chosen else []
    rows += list(learning(sizes, device, args.quick, say)) if "loss" in chosen else []
    batch, time = sizes.tokens
    note = f"Llama {sizes.llama.layers} × {sizes.llama.width}, {batch} × {time} tokens; {STEPS} steps of a GPT"
    missed = any(row["passed"] is False for row in rows)
    return Outcome(note, table(rows), rows, missed)


# --- speed ---


def speed(
    sizes: Sizes, device: str, rounds: int, quick: bool, say: Callable[[str], None]
) -> Iterator[dict[str, object]]:
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(sizes.llama).to(torch.bfloat16)
        tokens = torch.randint(sizes.llama.vocab, sizes.tokens)
    calls: dict[str, Callable[[], object]] = {}
    for who, step in contestants(model, sizes, quick).items():
        say(f"step: {who}")
        try:
            call = _bound(step(), tokens)
            for _ in range(4):  # compile, and let graphs be captured
                call()
            calls[who] = call
        except Exception as error:  # a peer that cannot is named and left out
            if who != TORCHAO:
                raise
            yield {"section": "step", "who": who, "error": short(error), "passed": None}
        tidy(device)
    if reason := dead(device):
        raise RuntimeError(reason)
    say("step: all of them")
    samples = interleave(calls, rounds=rounds, repeat=sizes.repeat, block=timed_block(device))
    for who, seconds in samples.items():
        times = ratio(samples, who, BF16)
        held = who == EIGHT and device == "cuda"
        yield {
            "section": "step", "who": who, "ms": median(seconds) * 1e3, "ratio": times, "samples": seconds,
            "at_most": AT_MOST if held else None, "passed": times <= AT_MOST if held else None,
        }  # fmt: skip


def _bound(step: Step, tokens: Tensor) -> Callable[[], object]:
    return lambda: step(tokens, tokens)


def contestants(model: nn.Module, sizes: Sizes, quick: bool) -> dict[str, Callable[[], Step]]:
    """By name, what makes a step of a copy of the model."""

    def tessera_step(recipe: tessera.FP8 | None) -> Step:
        own = copy.deepcopy(model)
        return tessera.train_step(own, None, torch.optim.AdamW(own.parameters(), lr=1e-5), precision=recipe, **ours())  # type: ignore[arg-type]

    def eager_step(own: nn.Module, call: Callable) -> Step:
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-5, fused=True)

        def step(*batch: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = call(*batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def eager() -> Step:
        own = copy.deepcopy(model)
        return eager_step(own, own)

    def torchao() -> Step:
        own = copy.deepcopy(model)
        linear = [name for name, m in own.named_modules() if isinstance(m, nn.Linear)]
        kept = {linear[0], linear[-1]}
        convert = import_module("torchao.float8").convert_to_float8_training
        convert(own, module_filter_fn=lambda m, name: name not in kept)
        return eager_step(own, torch.compile(own))

    chosen = recipes(sizes.smallest, quick)
    by_recipe = {who: lambda recipe=recipe: tessera_step(recipe) for who, recipe in chosen.items()}
    if quick:
        return by_recipe
    return {EAGER: eager, **by_recipe, **({TORCHAO: torchao} if find_spec("torchao") else {})}


# --- what is learnt ---


def language(config: GPTConfig, batch: int, device: str) -> Iterator[Tensor]:
    """Batches of a language in which every token has four likely followers; always the same ones."""
    random = torch.Generator().manual_seed(0)
    follows = torch.randint(config.vocab, (config.vocab, 4), generator=random)
    likely = torch.tensor([0.6, 0.25, 0.1, 0.05])
    while True:
        text = torch.randint(config.vocab, (batch, 1), generator=random)
        choice = torch.multinomial(likely, batch * config.context, replacement=True, generator=random).view(batch, -1)
        for i in range(config.context):
            text = torch.cat([text, follows[text[:, -1], choice[:, i]][:, None]], 1)
        yield text.to(device)


def losses(recipe: tessera.FP8 | None, sizes: Sizes, device: str, steps: int, narrow: bool = True) -> list[float]:
    """Of every step: weights in 32 bits, products in 16 under autocast, or in 8; all in 32 where not `narrow`."""
    torch.manual_seed(0)
    model = GPT(sizes.gpt).to(device)

    def loss_of(model: nn.Module, text: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=narrow):
            return model(text[:, :-1], text[:, 1:])

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP, total_iters=WARMUP)
    step = tessera.train_step(model, loss_of, optimizer, precision=recipe, clip_norm=1.0, **ours())  # type: ignore[arg-type]
    batches, values = language(sizes.gpt, sizes.batch, device), []
    for _ in range(steps):
        values.append(step(next(batches)).detach().clone())  # type: ignore[attr-defined]
        warmup.step()
    return torch.stack(values).float().tolist()


def learning(sizes: Sizes, device: str, quick: bool, say: Callable[[str], None]) -> Iterator[dict[str, object]]:
    usual: list[float] = []
    compared = {**recipes(min(sizes.smallest, sizes.gpt.width), quick), F32: None}
    for who, recipe in compared.items():
        say(f"loss: {who}")
        curve = losses(recipe, sizes, device, STEPS, narrow=who != F32)
        means = _means(curve)
        usual = usual or means
        off = [(a - b) / b for a, b in zip(means, usual, strict=True)]
        furthest = max(map(abs, off))
        told = " ".join(f"{loss:.4f} ({100 * o:+.2f}%)" for loss, o in zip(means, off, strict=True))
        print(f"{who}, means of {WINDOW} steps: {told}", file=sys.stderr)
        yield {
            "section": "loss", "who": who, "losses": curve, "last": means[-1], "off": furthest,
            "at_most": None if recipe is None else CLOSE, "passed": None if recipe is None else furthest <= CLOSE,
        }  # fmt: skip


def _means(curve: list[float]) -> list[float]:
    return [mean(curve[i : i + WINDOW]) for i in range(0, len(curve), WINDOW)]


# --- in words ---


def table(rows: list[dict[str, object]]) -> Table:
    shown = Table("what", "who", title="training in 8 bits", title_justify="left")
    for header in ("step", "a second", "ratio", "last loss", "furthest off", "target"):
        shown.add_column(header, justify="right")
    shown.add_column("")
    for row in rows:
        mark = {True: "[green]pass", False: "[red]fail", None: ""}[row["passed"]]  # type: ignore[index]
        limit = f"<= {row['at_most']:g}" if row.get("at_most") else ""
        if "error" in row:
            shown.add_row(str(row["section"]), str(row["who"]), str(row["error"]))
        elif row["section"] == "step":
            times = f"{row['ms']:.2f} ms", f"{1e3 / row['ms']:.2f}", f"{row['ratio']:.2f} x {BF16}"  # type: ignore[operator]
            shown.add_row("step", str(row["who"]), *times, "", "", limit, mark)
        else:
            off = f"{row['last']:.4f}", f"{100 * row['off']:.2f}%"  # type: ignore[operator]
            shown.add_row("loss", str(row["who"]), "", "", "", *off, limit, mark)
    return shown
