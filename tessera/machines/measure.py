"""Rates of the device at hand, measured: some tens of milliseconds each, the best of a few turns.

In: a device. Out: seconds and rates as the figures of a description have them. `rates` gives the device's Machine with
its bandwidth and its products measured, which is what a fraction of the roofline should be a fraction of.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

import torch

from tessera.machines.describe import Machine
from tessera.machines.here import machine_of, with_figures

MEASURED = "measured"  # how the source of such a figure begins
LARGE = {"cuda": 1 << 30, "cpu": 1 << 26}  # bytes: more than all caches hold
SIDE = {"cuda": 8192, "cpu": 768}  # of a matrix


def rates(device: torch.device | str) -> Machine:
    """The device's machine; what was not measured on such a one is measured here, once."""
    device = torch.device(device)
    known = machine_of(device)
    return known if known.figures["bandwidth"].source.startswith(MEASURED) else _measured(device, known)


@functools.cache
def _measured(device: torch.device, known: Machine) -> Machine:
    cuda = device.type == "cuda"
    product = product_rate(device, torch.bfloat16 if cuda else torch.float32, 4096 if cuda else 512)
    figures = {"bandwidth": copy_rate(device, LARGE[device.type] // 4), "matrix.bfloat16": product}
    return with_figures(known, figures if cuda else figures | {"flops.float32": product}, "measured here")


def seconds(work: Callable[[], object], device: torch.device, repeat: int = 1, turns: int = 5) -> float:
    """Of one call: the best turn of so many, each of `repeat` calls in a row."""
    work()
    best = math.inf
    for _ in range(turns):
        wait(device)
        start = time.perf_counter()
        for _ in range(repeat):
            work()
        wait(device)
        best = min(best, time.perf_counter() - start)
    return best / repeat


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_rate(device: torch.device, size: int, repeat: int = 1) -> float:
    """Bytes a second, read and written."""
    a, b = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / seconds(lambda: b.copy_(a), device, repeat)


def product_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Multiplications and additions a second of a square product on random numbers."""
    x = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / seconds(lambda: x @ x, device)
