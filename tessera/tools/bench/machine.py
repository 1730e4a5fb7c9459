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
from functools import partial

import torch
import torch.nn.functional as F
from rich.table import Table

import tessera
from tessera.machines import Machine, machine_of
from tessera.machines.describe import figure_text
from tessera.machines.here import with_figures
from tessera.machines.measure import LARGE, MEASURED, SIDE, copy_rate, product_rate, seconds, wait
from tessera.tile.dialect.build import KernelBuilder, f32
from tessera.tile.targets import target_for
from tessera.tools.bench.core import Say
from tessera.tools.bench.report import Outcome

LONG = 1.0  # seconds, after which a GPU's clock has settled
AGAIN = 20  # calls in a row, of what takes milliseconds
CALLS = 200  # in a row, of what takes microseconds
QUEUED = 800  # calls that a GPU's queue holds
AHEAD = 4  # products, which take longer than the host for all of these
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


def sustained(device: torch.device, known: Machine) -> Figures:
    """What a training step of a large model can count on: large products for a second, and attention."""
    if device.type == "cuda":
        yield "sustained.bfloat16", products(device, torch.bfloat16, 16384, 4096, 14336)
        yield from attention(device, torch.bfloat16, 2, 32, 8, 8192, 128).items()


def host(device: torch.device, known: Machine) -> Figures:
    x, y = torch.ones(16, device=device), torch.ones(16, device=device)
    yield "call", _host_seconds(lambda: torch.add(x, x, out=y), device)
    if (run := _tile_kernel(device)) is not None:
        yield "launch", _host_seconds(lambda: run((x, y), ()), device)
    if device.type == "cuda":
        yield "kernel", _behind_products(lambda: torch.add(x, x, out=y), device)
    if device.type == "cpu" and known.units > 1:
        yield "fork", _fork(device)


SECTIONS: dict[str, Callable[[torch.device, Machine], Figures]] = {
    "memory": memory,
    "compute": compute,
    "sustained": sustained,
    "host": host,
}


def products(device: torch.device, dtype: torch.dtype, rows: int, width: int, hidden: int) -> float:
    """Multiplications and additions a second of a layer's product, for about a second: power limits the clock then."""
    x, w = (torch.randn(n, width, device=device).to(dtype) for n in (rows, hidden))
    flops = 2 * rows * width * hidden
    once = seconds(lambda: F.linear(x, w), device)
    return flops / seconds(lambda: F.linear(x, w), device, max(1, int(LONG / once)), turns=1)


def attention(
    device: torch.device, dtype: torch.dtype, rows: int, heads: int, kv_heads: int, length: int, head: int
) -> dict[str, float]:
    """Causal attention as programs run it, forward and backward."""
    shapes = [(rows, n, length, head) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes)
    cotangent = torch.randn_like(q)
    attend = tessera.jit(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    flops = 2.0 * rows * heads * length * length * head  # two products, of which the mask leaves half

    def both() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v), cotangent)

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    ahead, whole = (seconds(call, device, AGAIN, turns=3) for call in (forward, both))
    return {"attention.forward": flops / ahead, "attention.backward": 2.5 * flops / (whole - ahead)}


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


def _behind_products(work: Callable[[], object], device: torch.device) -> float:
    """Of the device for one call, which the host has made ready while products ran."""
    side = SIDE[device.type]
    x = torch.randn(side, side, device=device).to(torch.bfloat16)

    def products(calls: int) -> None:
        for _ in range(AHEAD):
            x @ x
        for _ in range(calls):
            work()

    alone, both = (seconds(partial(products, calls), device) for calls in (0, QUEUED))
    return max((both - alone) / QUEUED, 1e-9)


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
