"""The machine at hand: the nearest description, with the figures that the driver or the system tells of the device.

In: a device. Out: its Machine, the same object every time. The flag `machine` names another one, and has to where
kernels are written for a GPU that is not there. A description of the same name and size is taken as it is; of another
one the rates are scaled by the number of units, and its memory's by what the driver tells.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from dataclasses import replace

import torch

from tessera.machines.describe import Figure, Machine, known, machine
from tessera.util.config import config
from tessera.util.errors import OptionError

KINDS = {"cuda": "gpu", "cpu": "cpu"}
RATES = ("flops.", "matrix.", "sustained.", "attention.")  # figures that grow with the number of units
COPIED = 0.85  # of the promised bandwidth: the share that a copy reaches on an H200
# what PyTorch calls a property of a GPU -> our figure
PROPERTIES = {
    "multi_processor_count": "units",
    "total_memory": "memory",
    "L2_cache_size": "l2",
    "shared_memory_per_multiprocessor": "shared",
    "shared_memory_per_block_optin": "shared_block",
    "regs_per_multiprocessor": "registers",
    "max_threads_per_multi_processor": "threads",
}


def machine_of(device: torch.device | str) -> Machine:
    """The machine that a device is, or that the flag says it is."""
    device = torch.device(device)
    if config.machine != "auto" and (named := machine(config.machine)).kind == KINDS.get(device.type):
        return named
    match device.type:
        case "cpu":
            return _cpu()
        case "cuda":
            return _gpu(_current() if device.index is None else device.index)
    raise OptionError(f"no machine is described for a device of type {device.type!r}")


def _current() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


@functools.cache
def _gpu(index: int) -> Machine:
    if not torch.cuda.is_available():
        gpus = ", ".join(known("gpu"))
        raise OptionError(f"there is no GPU here to take its figures from; name one by machine=, such as {gpus}")
    return described_gpu(torch.cuda.get_device_properties(index))


@functools.cache
def _cpu() -> Machine:
    arm = platform.machine() in ("aarch64", "arm64")
    figures = {"units": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1}
    bits = {"AVX512": 512, "AVX2": 256, "SVE256": 256}.get(torch.backends.cpu.get_cpu_capability(), 128)
    return with_figures(_of_size(described_cpu(arm, bits), figures["units"]), figures, "the operating system")


def described_gpu(properties) -> Machine:
    """The description nearest to a GPU: by its name, then by its architecture, then by its size and its memory."""
    capability, units = 10 * properties.major + properties.minor, properties.multi_processor_count
    memory = getattr(properties, "total_memory", 0)
    short = properties.name.lower().replace(" ", "").replace("-", "")

    def distance(m: Machine) -> tuple:
        memory_gap = abs(m["memory"] - memory) if memory else 0
        return -_alike(m.key, short), abs(m.capability - capability), abs(m.units - units), memory_gap

    nearest = min(map(machine, known("gpu")), key=distance)
    figures = {ours: getattr(properties, theirs, 0) for theirs, ours in PROPERTIES.items()}
    named = replace(nearest, architecture=f"sm_{capability}")
    if _alike(nearest.key, short) and nearest.units == units:
        return with_figures(named, figures, "the driver")
    # Both edges of the memory's clock, in kHz, carry a bit a line.
    promised = 2e3 * getattr(properties, "memory_clock_rate", 0) * getattr(properties, "memory_bus_width", 0) / 8
    moved = {"peak_bandwidth": promised, "bandwidth": COPIED * promised}
    return with_figures(_of_size(replace(named, name=properties.name), units), figures | moved, "the driver")


def _alike(key: str, short: str) -> int:
    """How much of a GPU's name its key says: of "gb200-nvl72" all, or the part before the dash."""
    whole, first = key.replace("-", ""), key.partition("-")[0]
    return len(whole) if whole in short else len(first) if first in short else 0


def _of_size(described: Machine, units: int) -> Machine:
    """With the rates of so many units."""
    rates = {name: f.value for name, f in described.figures.items() if name.startswith(RATES)}
    scaled = {name: value * units / described.units for name, value in rates.items()}
    return with_figures(described, scaled, f"that of {described.key}, by the number of units")


def described_cpu(arm: bool, vector_bits: int) -> Machine:
    """The description nearest to a CPU: of its family, and with registers as long."""
    cpus = [m for m in map(machine, known("cpu")) if m.architecture.startswith("arm") == arm]
    return min(cpus, key=lambda m: abs(m["vector_bits"] - vector_bits))


def with_figures(of: Machine, values: Mapping[str, float], source: str) -> Machine:
    """With these figures in place of the described ones; values of 0 are unknown and left out."""
    figures = {name: Figure(float(value), source) for name, value in values.items() if value}
    return replace(of, figures={**of.figures, **figures})
