"""Who runs tile kernels on which device. A target's package is imported only when a device needs it."""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch

from tessera.machines import Machine, machine_of
from tessera.tile.targets.base import CompiledKernel, Target
from tessera.util.config import config

__all__ = ["CompiledKernel", "Target", "missing", "named", "target_for"]

# target: (the package it stands on, how to get it, the class in the target's own package)
TARGETS = {
    "cpu": ("llvmlite", "pip install llvmlite", "CpuTarget"),
    "triton": ("triton", "pip install triton", "TritonTarget"),
    "cuda_tile": ("cuda.tile", "pip install 'cuda-tile[tileiras]'", "CudaTile"),
}
DEVICES = {"cuda": "triton", "cpu": "cpu"}  # the target that runs kernels on a device


def missing(name: str) -> str:
    """What has to be installed before this target works, in words; empty where nothing is missing."""
    package, remedy, _ = TARGETS[name]
    return "" if _installed(package) else f"target {name!r} needs the package {package!r}; try: {remedy}"


def named(name: str, machine: Machine | None = None) -> Target | None:
    """The target of that name for a machine, by default the one at hand; None where its package is absent."""
    if missing(name):
        return None
    return _make(name, machine or machine_of("cpu" if name == "cpu" else "cuda"))


def target_for(device: torch.device | str) -> Target | None:
    """The target that runs kernels on this device, or None where nothing here can."""
    device = torch.device(device)
    if device.type == "cpu" or device.index is not None:  # which device that is does not change
        return _target_of(device, config.machine)
    return _target(device)


@functools.cache  # asked of every equation
def _target_of(device: torch.device, machine: str) -> Target | None:
    return _target(device)


def _target(device: torch.device) -> Target | None:
    name = DEVICES.get(device.type)
    return None if name is None or missing(name) else _make(name, machine_of(device))


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is absent
        return False


@functools.cache
def _make(name: str, machine: Machine) -> Target:
    return getattr(importlib.import_module(f"{__package__}.{name}.target"), TARGETS[name][2])(machine)
