"""`tessera bench machine`: what the device at hand does, beside what its description says.

In: a device. Out: a row a figure with the ratio of measured to described; `--json` writes a description with the
measured figures in place, which the flag `machine` takes. Each figure is the best of a few turns: what else runs on the
machine makes it slower, never faster.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from rich.table import Table

from tessera.machines import Machine, machine_of
from tessera.machines.describe import figure_text
from tessera.machines.here import with_figures
from tessera.machines.measure import LARGE, MEASURED, SIDE, copy_rate, product_rate, seconds, wait
from tessera.tile.dialect.build import KernelBuilder, f32
from tessera.tile.targets import target_for
from tessera.tools.bench.core import Say
from tessera.tools.bench.report import Outcome

CALLS = 200  # in a row, of what takes microseconds
SHARED = 1 << 16  # elements: what two threads of PyTorch divide
Figures = Iterator[tuple[str, float]]


def memory(device: torch.device, known: Machine) -> Figures:
    size = LARGE[device.type]
    yield "bandwidth", copy_rate(device, size)
    a, b, c = (torch.ones(size // 4, device=device) for _ in range(3))
    yield "triad_bandwidth", 3 * size / seconds(lambda: torch.add(a, b, alpha=2.0, out=c), device)
    if "l2" in known:
        yield "l2_bandwidth", copy_rate(device, known.size("l2") // 4, 50)
    if device.type == "cuda":
        host = torch.ones(size // 4, pin_memory=True)
        yield "link.pcie", size / seconds(lambda: a.copy_(host, non_blocking=True), device)


def compute(device: torch.device, known: Machine) -> Figures:
    """Products of the library: plain units at full precision, matrix units otherwise."""
    side = SIDE[device.type]
    with _precision("highest"):
        yield "flops.float32", product_rate(device, torch.float32, side)
        yield "flops.float64", product_rate(device, torch.float64, side // 2)
    if device.type == "cuda":
        with _precision("high"):
            yield "matrix.tfloat32", product_rate(device, torch.float32, side)
        yield "matrix.float16", product_rate(device, torch.float16, side)
        yield "matrix.bfloat16", product_rate(device, torch.bfloat16, side)
    elif "matrix.bfloat16" in known:  # without matrix units 16 bits are emulated, and slow
        yield "matrix.bfloat16", product_rate(device, torch.bfloat16, side)


def host(device: torch.device, known: Machine) -> Figures:
    x, y = torch.ones(16, device=device), torch.ones(16, device=device)
    yield "call", _host_seconds(lambda: torch.add(x, x, out=y), device)
    if (run := _tile_kernel(device)) is not None:
        yield "launch", _host_seconds(lambda: run((x, y), ()), device)
    if device.type == "cpu" and known.units > 1:
        yield "fork", _fork(device)


SECTIONS: dict[str, Callable[[torch.device, Machine], Figures]] = {"memory": memory, "compute": compute, "host": host}


def outcome(args: Namespace, say: Say) -> Outcome:
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    known = machine_of(device)
    measured: dict[str, float] = {}
    for name in args.only or SECTIONS:
        for figure, value in SECTIONS[name](device, known):
            say(f"{figure}: {figure_text(figure, value)}")
            measured[figure] = value
    source = f"{MEASURED} here: torch {torch.__version__}, {torch.get_num_threads()} threads"
    here = with_figures(known, measured, source)
    return Outcome(f"described as {known.name}", table(measured, known), [], False, here.data())


def table(measured: dict[str, float], known: Machine) -> Table:
    shown = Table("figure", title="tessera bench machine", title_justify="left")
    for header in ("measured", "described", "ratio"):
        shown.add_column(header, justify="right")
    shown.add_column("where the description has it from")
    for figure, value in measured.items():
        described = known.figures.get(figure)
        beside = ("", "", "") if described is None else (
            figure_text(figure, described.value), f"{value / described.value:.2f}", described.source
        )  # fmt: skip
        shown.add_row(figure, figure_text(figure, value), *beside)
    return shown


def _host_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of the host for one call, however long the device takes."""
    best = seconds(work, device, CALLS)
    for _ in range(5):
        wait(device)
        start = time.perf_counter()
        for _ in range(CALLS):
            work()
        best = min(best, (time.perf_counter() - start) / CALLS)
    return best


def _fork(device: torch.device) -> float:
    """What two threads take longer for a sum than half of what one takes."""
    a, b, before = torch.ones(SHARED), torch.ones(SHARED), torch.get_num_threads()
    times = {}
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            times[threads] = seconds(lambda: torch.add(a, a, out=b), device, CALLS)
    finally:
        torch.set_num_threads(before)
    return max(times[2] - times[1] / 2, 1e-9)


def _tile_kernel(device: torch.device) -> Callable | None:
    """y = x + x over a few elements."""
    target = target_for(device)
    if target is None:
        return None
    k = KernelBuilder("twice")
    i = k.axis("i", 16)
    x, y = k.buffer(f32), k.buffer(f32)
    value = k.load(x, i)
    k.store(k.apply("add", value, value), y, i)
    kernel = k.finish()
    return target.compile(kernel, target.propose(kernel, {})[0])


@contextmanager
def _precision(of: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(of)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
