"""Who runs tile kernels on which device. A target's package is imported only when a device needs it."""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch

from tessera.tile.targets.base import CompiledKernel, Target

__all__ = ["CompiledKernel", "Target", "missing", "named", "target_for"]

# target: (the package it stands on, how to get it, our module that holds TARGET)
TARGETS = {
    "cpu": ("llvmlite", "pip install llvmlite", "tessera.tile.targets.cpu"),
    "triton": ("triton", "pip install triton", "tessera.tile.targets.triton"),
    "cuda_tile": ("cuda.tile", "pip install 'cuda-tile[tileiras]'", "tessera.tile.targets.cuda_tile"),
}


def missing(name: str) -> str:
    """What has to be installed before this target works, in words; empty where nothing is missing."""
    package, remedy, _ = TARGETS[name]
    return "" if _installed(package) else f"target {name!r} needs the package {package!r}; try: {remedy}"


def named(name: str) -> Target | None:
    """The target of that name, or None where its package is absent."""
    return None if missing(name) else _load(name)


def target_for(device: torch.device | str) -> Target | None:
    """The target that runs kernels on this device, or None where nothing here can."""
    match torch.device(device).type:
        case "cuda":
            return named("triton")
        case "cpu":
            return named("cpu")
    return None


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is absent
        return False


@functools.cache
def _load(name: str) -> Target:
    return importlib.import_module(TARGETS[name][2]).TARGET
