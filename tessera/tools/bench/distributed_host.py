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


def compiling(say: Say) -> list[Row]:
    seconds = {}
    with override(program_cache=False):
        for name, (axes, plan) in {"one process": (None, None), **PLANS}.items():
            say(f"compiling for {name}")
            seconds[name] = min(_first_call(axes, plan) for _ in range(3))  # the first one warms up
    alone = seconds["one process"]
    rows = [Row("compile", name, 1e3 * s, "ms", note=f"{s / alone:.2f} x one process") for name, s in seconds.items()]
    for name in ("zero3 on 8", "sequence on 8"):
        rows.append(Row("compile", f"{name} / one process", seconds[name] / alone, "x", 1.4))
    ratio = seconds["zero3·sequence on 16384"] / seconds["zero3·sequence on 8"]
    return [*rows, Row("compile", "16384 ranks / 8 ranks", ratio, "x", 1.1)]


CALLS, STEPS = 2000, 20
EXCHANGES = {
    "all_gather": (0, "dp"),
    "reduce_scatter": (0, "dp"),
    "all_reduce": ("dp",),
    "all_to_all": (0, 0, "dp"),
    "permute": ("dp", 1),
}


def _each(call: Callable[[], object], count: int) -> float:
    """CPU microseconds of a call."""

    def calls() -> None:
        for _ in range(count):
            call()

    return 1e6 * min(_seconds(calls, ()) for _ in range(5)) / count


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
        for name, args in EXCHANGES.items():
            say(name)
            theirs = _each(alone[name], CALLS)
            taken = _each(lambda name=name, args=args: wait(begin(x, name, *args), x, name, *args), CALLS)
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
    x, micros = torch.randn(8, 32), {}

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

    def taken(step: Callable[[], object]) -> float:
        step()
        step()
        return _each(step, STEPS)

    micros["eager"] = taken(eager(Layers()))
    micros["alone"] = taken(ours())
    with _rank({"tp": 4}) as mesh:
        laid_out = Layers()
        for pair in laid_out:
            parallelize_module(pair, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})  # type: ignore[arg-type]
        micros["DTensor"] = taken(eager(laid_out))
        step = ours(mesh=mesh, plan="tensor")
        micros["sharded"] = taken(step)
        exchanges = 2 * len(laid_out)  # an all-reduce a pair, forward and backward
    told = ", ".join(f"{name} {1e-3 * each:.2f} ms" for name, each in micros.items())
    extra = (micros["sharded"] - micros["alone"]) / exchanges
    return [
        Row("host", "an exchange in a step", extra, "µs", 15.0, note=told),
        Row("host", "step / eager DTensor's", micros["sharded"] / micros["DTensor"], "x", 0.2),
    ]
