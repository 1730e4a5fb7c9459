"""What compiling for a mesh costs, and the host's part of an exchange and of a step: `tessera bench distributed --only
compile host`.

In: what says how far it is. Out: rows, of CPU time of this machine, over groups that do not exist: first steps of a
tiny GPT, small exchanges, steps of pairs of layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tessera
from tessera.ir.dist import on
from tessera.ir.mesh import Mesh
from tessera.tools.models import GPT, GPTConfig
from tessera.util.config import override

Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    section: str
    what: str
    value: float
    unit: str
    at_most: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool | None:
        return None if self.at_most is None else self.value <= self.at_most


@contextmanager
def _rank(axes: dict[str, int]) -> Iterator:
    try:
        yield tessera.mesh(device="cpu", fake=True, **axes)
    finally:
        dist.destroy_process_group()


def _loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return model(ids, labels)


MODEL = GPTConfig(layers=6, width=64, heads=4, vocab=128, context=32)
PLANS = {
    "zero3 on 8": ({"dp": 8}, "zero3"),
    "sequence on 8": ({"tp": 4, "dp": 2}, {"dp": "ddp", "tp": "sequence"}),
    "zero3·sequence on 8": ({"dp": 2, "tp": 4}, {"dp": "zero3", "tp": "sequence"}),
    "zero3·sequence on 16384": ({"dp": 4096, "tp": 4}, {"dp": "zero3", "tp": "sequence"}),
}


def _first_call(axes: dict[str, int] | None, plan: Any) -> float:
    """CPU seconds of a first step."""
    torch.manual_seed(0)
    model = GPT(MODEL)
    rows = torch.randint(0, 128, (4, 33))
    batch = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    if axes is None:
        return _seconds(
            tessera.train_step(model, _loss, torch.optim.AdamW(model.parameters()), executors="aten"), batch
        )
    with _rank(axes) as mesh:
        optimizer = torch.optim.AdamW(model.parameters())
        return _seconds(tessera.train_step(model, _loss, optimizer, executors="aten", mesh=mesh, plan=plan), batch)


def _seconds(call: Callable, args: tuple) -> float:
    start = time.process_time()
    call(*args)
    return time.process_time() - start


COMPILED = 5


def compiling(say: Say) -> list[Row]:
    plans = {"one process": (None, None), **PLANS}
    taken: dict[str, list[float]] = {name: [] for name in plans}
    with override(program_cache=False):
        for n in range(1 + COMPILED):  # in turn, since others may be busy on this machine for a while
            for name, (axes, plan) in plans.items():
                say(f"compiling for {name}, {n + 1} of {1 + COMPILED}")
                taken[name].append(_first_call(axes, plan))
    seconds = {name: median(each[1:]) for name, each in taken.items()}  # the first one warms up
    alone = seconds["one process"]
    rows = [Row("compile", name, 1e3 * s, "ms", note=f"{s / alone:.2f} x one process") for name, s in seconds.items()]
    for name in ("zero3 on 8", "sequence on 8"):
        rows.append(Row("compile", f"{name} / one process", seconds[name] / alone, "x", 1.4))
    ratio = seconds["zero3·sequence on 16384"] / seconds["zero3·sequence on 8"]
    return [*rows, Row("compile", "16384 ranks / 8 ranks", ratio, "x", 1.1)]


CALLS, STEPS, ROUNDS = 1000, 10, 10


def _each(*calls: Callable[[], object], count: int) -> list[float]:
    """CPU microseconds of each call. They take turns, so that a machine that slows down does so for all of them."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for i, call in enumerate(calls):
            start = time.process_time()
            for _ in range(count):
                call()
            best[i] = min(best[i], time.process_time() - start)
    return [1e6 * seconds / count for seconds in best]


def host(say: Say) -> list[Row]:
    """CPU time of an exchange of a small tensor, begun and waited for, beside what the group itself does: a fake one
    copies what is gathered, once for each rank."""
    rows, x, small, large = [], torch.ones(8, 16), torch.ones(2, 16), torch.ones(32, 16)
    with _rank({"dp": 4}):
        ops = on(Mesh.of(dp=4))
        begin, wait, group = ops.begin.fn, ops.wait.fn, ops.communicator.groups["dp"]  # type: ignore[union-attr]
        alone = {
            "all_gather": lambda: group.all_gather(large, x).wait(),
            "reduce_scatter": lambda: group.reduce_scatter(small, x).wait(),
            "all_reduce": lambda: group.all_reduce(x, "sum").wait(),
            "all_to_all": lambda: group.all_to_all(x, x, [], []).wait(),
            "permute": lambda: group.all_to_all(x, x, [0, 0, 0, 8], [0, 8, 0, 0]).wait(),
        }
        ours = {  # written as programs write them
            "all_gather": lambda: wait(begin(x, "all_gather", 0, "dp"), x, "all_gather", 0, "dp"),
            "reduce_scatter": lambda: wait(begin(x, "reduce_scatter", 0, "dp"), x, "reduce_scatter", 0, "dp"),
            "all_reduce": lambda: wait(begin(x, "all_reduce", "dp"), x, "all_reduce", "dp"),
            "all_to_all": lambda: wait(begin(x, "all_to_all", 0, 0, "dp"), x, "all_to_all", 0, 0, "dp"),
            "permute": lambda: wait(begin(x, "permute", "dp", 1), x, "permute", "dp", 1),
        }
        for name in ours:
            say(name)
            theirs, taken = _each(alone[name], ours[name], count=CALLS)
            rows.append(Row("host", name, taken - theirs, "µs", 15.0, f"beside {theirs:.1f} µs of the fake group"))
    say("steps of layers under DTensor")
    return [*rows, *_beside_dtensor()]


class Layers(nn.Sequential):
    """Pairs of layers, of which tensor parallelism splits columns, then rows."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(12)))


def _squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _beside_dtensor() -> list[Row]:
    """A training step of layers: eager, over DTensors that PyTorch laid out, and ours, on one rank and on one of 4."""
    x = torch.randn(8, 32)

    def eager(model: nn.Module) -> Callable[[], None]:
        by = torch.optim.SGD(model.parameters(), 0.1)

        def step() -> None:
            _squares(model, x).backward()
            by.step()
            by.zero_grad()

        return step

    def ours(**options: Any) -> Callable[[], object]:
        model = Layers()
        step = tessera.train_step(
            model, _squares, torch.optim.SGD(model.parameters(), 0.1), executors="aten", **options
        )
        return lambda: step(x)

    with _rank({"tp": 4}) as mesh:
        laid_out = Layers()
        for pair in laid_out:
            parallelize_module(pair, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})  # type: ignore[arg-type]
        steps = {
            "eager": eager(Layers()), "alone": ours(), "DTensor": eager(laid_out),
            "sharded": ours(mesh=mesh, plan="tensor"),
        }  # fmt: skip
        for step in (*steps.values(), *steps.values()):  # the first one compiles
            step()
        micros = dict(zip(steps, _each(*steps.values(), count=STEPS), strict=True))
        exchanges = 2 * len(laid_out)  # an all-reduce a pair, forward and backward
    told = ", ".join(f"{name} {1e-3 * each:.2f} ms" for name, each in micros.items())
    extra = (micros["sharded"] - micros["alone"]) / exchanges
    return [
        Row("host", "an exchange in a step", extra, "µs", 15.0, note=told),
        Row("host", "step / eager DTensor's", micros["sharded"] / micros["DTensor"], "x", 0.2),
        *_over_data(ours, "ddp", "zero1", "zero3"),
    ]


def _over_data(ours: Callable, *words: str) -> list[Row]:
    """What an exchange of a weight or a gradient costs in a step where many of them are joined, with all that it takes
    to join them and to take them apart."""
    rows, alone = [], ours()
    with _rank({"dp": 4}) as mesh:
        for word in words:
            step, model = ours(mesh=mesh, plan=word), Layers()
            for call in (alone, step, alone, step):
                call()
            one, many = _each(alone, step, count=STEPS)
            exchanges = len([*model.parameters()]) * (1 if word == "ddp" else 2)  # gradients; weights are gathered
            note = f"{exchanges} weights and gradients, alone {1e-3 * one:.2f} ms, sharded {1e-3 * many:.2f} ms"
            rows.append(Row("host", f"one of many in a step of {word}", (many - one) / exchanges, "µs", 15.0, note))
    return rows
