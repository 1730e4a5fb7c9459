"""`tessera bench distributed`: what stays exposed on large meshes, also beside PyTorch's order, what compiling for a
mesh costs, the host's part, one rank run for real.

In: sections. Out: rows. Steps of large models are foreseen on H100s in boxes of eight by `inspection/timeline`, at full
rate and with all memory traffic fused away, so that what is exposed is the most that it can be. Equal layers are priced
once: a step of two layers and one of three tell what each further layer adds.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import tessera
from tessera.inspection.timeline import Timeline, timeline
from tessera.machines import machine
from tessera.tools.bench import one_rank
from tessera.tools.bench.distributed_host import Row, Say, compiling, host
from tessera.tools.bench.distributed_steps import compiled, program_of
from tessera.tools.bench.overlap import compared
from tessera.tools.bench.report import Outcome
from tessera.tools.llama import Attention, Llama, LlamaConfig, turns

FEW = (2, 3)  # layers that are compiled; what the third adds each further one does


# --- large models -------------------------------------------------------------------------------


class Experts(nn.Module):
    """Llama's attention; behind it every token's best experts, beside one that all tokens pass."""

    def __init__(self, config: LlamaConfig, experts: int, best: int, hidden: int) -> None:
        super().__init__()
        self.best, width = best, config.width
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.router = Attention(config), nn.Linear(width, experts, bias=False)
        self.up, self.gate = (nn.Parameter(torch.empty(experts, hidden, width)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.wide, self.narrow = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(2 * hidden, width, bias=False)

    def forward(self, x: Tensor, turn: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), turn, positions, None)
        n = self.norm2(x)
        tokens = n.reshape(-1, n.shape[-1])
        weights, choice = self.router(tokens).softmax(-1).topk(self.best)
        routed = tessera.experts(tokens, choice, weights, self.up, self.down, self.gate)
        return x + routed.view(x.shape) + self.narrow(F.silu(self.wide(n)))


class MoE(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.config = config = LlamaConfig(layers=layers, width=2048, heads=16, kv_heads=16, hidden=1408, vocab=102400)
        self.tokens, self.norm = nn.Embedding(config.vocab, config.width), nn.RMSNorm(config.width)
        self.blocks = nn.ModuleList(Experts(config, 64, 6, config.hidden) for _ in range(layers))
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids)
        turn = turns(positions, self.config, x.dtype)
        for block in self.blocks:
            x = block(x, turn, positions)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def _loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return model(ids, labels)


def _llama(layers: int, width: int, heads: int, hidden: int) -> nn.Module:
    return Llama(LlamaConfig(layers=layers, width=width, heads=heads, kv_heads=8, hidden=hidden, vocab=128256))


def _foreseen(
    make: Callable[[int], nn.Module], layers: int, axes: dict[str, int], plan: object, rows: int, say: Say
) -> tuple[float, float, dict[str, tuple[float, float]]]:
    """Seconds of a step, those that are exposed, and by collective those and all that it takes, of so many layers."""
    few: list[Timeline] = []
    for count in FEW:
        say(f"{count} of {layers} layers on {prod(axes.values())} ranks")
        few.append(
            timeline(program_of(partial(make, count), _loss, axes, plan, rows, 8192), machine("h100"), fused=True)
        )
    a, b = few

    def whole(x: float, y: float) -> float:
        return y + (layers - FEW[1]) * (y - x)

    by_name = {
        name: (whole(a.by_name.get(name, 0.0), b.by_name.get(name, 0.0)), whole(a.taken.get(name, 0.0), taken))
        for name, taken in b.taken.items()
    }
    return whole(a.seconds, b.seconds), whole(a.waiting, b.waiting), by_name


def _share(section: str, seconds: float, exposed: float, at_most: float | None, note: str) -> list[Row]:
    return [
        Row(section, "step", 1e3 * seconds, "ms", note=note),
        Row(section, "exposed", 100 * exposed / seconds, "%", at_most),
    ]


def zero3(say: Say) -> list[Row]:
    make = partial(_llama, width=4096, heads=32, hidden=14336)
    seconds, exposed, _ = _foreseen(make, 32, {"dp": 64}, "zero3", 2, say)
    return _share("8B zero3 on 64", seconds, exposed, 5.0, "2 x 8192 tokens a rank")


def async_tp(say: Say) -> list[Row]:
    make = partial(_llama, width=8192, heads=64, hidden=28672)
    plan = {"dp": "zero3", "tp": "async-tp"}
    seconds, exposed, _ = _foreseen(make, 80, {"dp": 32, "tp": 8}, plan, 4, say)
    return _share("70B zero3·async-tp on 256", seconds, exposed, 12.0, "dp=32 tp=8, 4 x 8192 tokens a data rank")


def experts(say: Say) -> list[Row]:
    seconds, exposed, by_name = _foreseen(MoE, 28, {"dp": 4, "ep": 8}, {"dp": "zero3", "ep": "experts"}, 2, say)
    rows = _share("MoE 16B experts·zero3 on 32", seconds, exposed, None, "dp=4 ep=8, 2 x 8192 tokens a rank")
    waited, taken = by_name["rows"]
    note = "of the time that they are on their way"
    return [*rows, Row(rows[0].section, "rows to experts exposed", 100 * waited / taken, "%", 50.0, note=note)]


# --- beside PyTorch's order -------------------------------------------------------------------------


_SMALL = partial(_llama, width=4096, heads=32, hidden=14336)
_LARGE = partial(_llama, width=8192, heads=64, hidden=28672)
ORDERS: dict[str, tuple[Callable[[int], nn.Module], dict[str, int], Any, int]] = {
    "8B zero3 on 64": (_SMALL, {"dp": 64}, "zero3", 2),
    "8B zero3 on 8": (_SMALL, {"dp": 8}, "zero3", 1),
    "8B zero2 on 64": (_SMALL, {"dp": 64}, "zero2", 2),
    "8B ddp on 8": (_SMALL, {"dp": 8}, "ddp", 1),
    "70B zero3·sequence on 256": (_LARGE, {"dp": 32, "tp": 8}, {"dp": "zero3", "tp": "sequence"}, 4),
    "70B zero3·async-tp on 256": (_LARGE, {"dp": 32, "tp": 8}, {"dp": "zero3", "tp": "async-tp"}, 4),
    "8B zero3·ulysses on 64": (_SMALL, {"dp": 8, "cp": 8}, {"dp": "zero3", "cp": "ulysses"}, 2),
    "MoE 16B experts·zero3 on 32": (MoE, {"dp": 4, "ep": 8}, {"dp": "zero3", "ep": "experts"}, 2),
}


def overlap(say: Say) -> list[Row]:
    """Three layers' exchanges in our order and in PyTorch's, of the same equations, by one table of costs."""
    rows, ratios = [], []
    for name, (make, axes, plan, count) in ORDERS.items():
        say(name)
        stages = dict(compiled(partial(make, FEW[-1]), _loss, axes, plan, count, 8192).account.stages)
        joined = list(stages)[list(stages).index("step overlap") - 1]
        ours, theirs, _ = compared(stages[joined], machine("h100"))
        if theirs is None:
            rows.append(Row(name, "exposed", 1e3 * ours.exposed, "ms", note="PyTorch's pass does not end"))
            continue
        ratios.append(ours.exposed / theirs.exposed)
        told = f"{1e3 * ours.exposed:.2f} ms, theirs {1e3 * theirs.exposed:.2f} ms"
        peaks = f"{ours.peak / 1e9:.2f} GB, theirs {theirs.peak / 1e9:.2f} GB"
        rows.append(Row(name, "exposed / PyTorch's", ratios[-1], "x", 1.0, told))
        rows.append(Row(name, "memory / PyTorch's", ours.peak / theirs.peak, "x", 1.0, peaks))
    mean = prod(ratios) ** (1 / len(ratios))
    return [*rows, Row("geometric mean", "exposed / PyTorch's", mean, "x", 0.8)]


# --- one rank, run for real -----------------------------------------------------------------------


def rank(say: Say) -> list[Row]:
    """On a GPU ranks of an 8B model; elsewhere ranks of a tiny one, whose figures say nothing."""
    cuda = torch.cuda.is_available()
    device, config = torch.device("cuda" if cuda else "cpu"), one_rank.LARGE if cuda else one_rank.TINY
    length, off = (8192, one_rank.OFF) if cuda else (64, None)
    say("rates of the device")
    here = one_rank.rates(device, config, 2, length)
    rows = [
        Row("rank", name, here[name] / 1e12, "TFLOP/s", note=here.figures[name].source)
        for name in ("sustained.bfloat16", "attention.forward", "attention.backward")
    ]
    rows += [Row("rank", name, here[name] * 1e6, "µs") for name in ("call", "launch", "kernel") if name in here]
    for case in one_rank.CASES:
        say(f"a rank of {case.name}")
        told = one_rank.measured(case, config, length, here, device)
        for what, (foreseen, seen), unit, scale in (
            ("work", told.seconds, "ms", 1e3), ("memory", told.bytes, "GB", 1e-9)
        ):  # fmt: skip
            note = f"foreseen {scale * foreseen:.4g} {unit}, measured {scale * seen:.4g} {unit}"
            rows.append(Row(f"8B {case.name}", f"{what} is off by", 100 * abs(foreseen / seen - 1), "%", off, note))
    return rows


def nccl(say: Say) -> list[Row]:
    """Every exchange over a group of one; where there is no GPU, over gloo."""
    device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    say(f"exchanges over {backend}")
    told = one_rank.exchanges(device, backend)
    wrong = [name for name, right in told.items() if not right]
    return [Row(backend, f"of {len(told)} exchanges wrong", len(wrong), "", 0.0, ", ".join(wrong))]


SECTIONS = {
    "zero3": zero3,
    "async": async_tp,
    "experts": experts,
    "overlap": overlap,
    "compile": compiling,
    "host": host,
    "rank": rank,
    "nccl": nccl,
}


def outcome(args: Namespace, say: Say) -> Outcome:
    rows = [row for name in args.only or SECTIONS for row in SECTIONS[name](say)]
    shown = Table("what", "", title="tessera bench distributed", title_justify="left")
    for header in ("value", "target", ""):
        shown.add_column(header, justify="right")
    shown.add_column("")
    for row in rows:
        limit = "" if row.at_most is None else f"<= {row.at_most:g} {row.unit}"
        mark = {True: "[green]pass", False: "[red]fail", None: ""}[row.passed]
        shown.add_row(row.section, row.what, f"{row.value:.2f} {row.unit}", limit, mark, row.note)
    listed = [{**row.__dict__, "passed": row.passed} for row in rows]
    return Outcome("one thread; steps are foreseen for H100s", shown, listed, any(row.passed is False for row in rows))
