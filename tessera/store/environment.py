"""Everything around a captured program that decides what it is compiled to: after a change no stored program is used.

Versions, Tessera's own text, the machine, flags, and the switches of PyTorch that passes, executors, kernels or type
rules look at. A new read of global state anywhere in compilation belongs into `environment` too.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from tessera.tile.targets import target_for
from tessera.torch_internals.operators import sdp_priority_order
from tessera.util.config import Config, config
from tessera.util.errors import Unserial

QUIET = ("log", "strict", "program_cache", "cache_size")  # flags that change no program
PACKAGES = ("torch", "triton", "cuda-tile", "llvmlite", "xdsl", "numpy", "sympy")


def environment(devices: Collection[torch.device]) -> dict[str, object]:
    """As data. `devices` are those of the program."""
    flags = [field.name for field in dataclasses.fields(Config) if field.name not in QUIET]
    return {
        "process": _process(),
        "targets": sorted({_target(d.type) for d in devices}),
        "flags": {name: getattr(config, name) for name in flags},
        "torch": switches(),
        "devices": sorted({_about(d) for d in devices}),
        "current": torch.cuda.current_device() if any(d.type == "cuda" for d in devices) and _has_cuda() else None,
    }


def switches() -> dict[str, str]:
    """PyTorch's own settings, process-wide or of this thread."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    asked: dict[str, Callable[[], object]] = {
        "default dtype": torch.get_default_dtype,
        "default device": torch.get_default_device,
        "inference": torch.is_inference_mode_enabled,
        "deterministic": lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "precision": torch.get_float32_matmul_precision,
        "matmul": lambda: (
            cuda.matmul.allow_tf32,
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
        ),
        "fp32": lambda: [
            getattr(b, "fp32_precision", "") for b in (torch.backends, cuda.matmul, cudnn.conv, cudnn.rnn)
        ],
        "cudnn": lambda: (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        "mkldnn": lambda: (torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic),
        "attention": lambda: (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            cuda.fp16_bf16_reduction_math_sdp_allowed(),
            sdp_priority_order(),
        ),
        "autocast": lambda: [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ],
    }
    return {name: _answer(ask) for name, ask in asked.items()}


def _answer(ask: Callable[[], object]) -> str:
    try:
        return repr(ask())
    except (AttributeError, RuntimeError) as error:  # not in this PyTorch, or two ways to set it at odds
        return f"{type(error).__name__}: {error}"


@functools.cache
def _process() -> list[str]:
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} absent")
    build = f"{torch.__version__} {torch.version.git_version} {torch.version.cuda} {torch.version.hip}"
    machine = f"{platform.machine()} {sys.platform} {sys.byteorder}"
    return [sys.version, build, machine, own_text(), os.environ.get("TRITON_INTERPRET", ""), *versions]


@functools.cache
def own_text(root: Path = Path(__file__).parent.parent, imported: float = time.time()) -> str:
    """A digest of Tessera's own sources, as they were imported."""
    paths = sorted(root.rglob("*.py"))
    if not paths:
        raise Unserial("Tessera's own sources are not here to be compared")
    digest = hashlib.sha256()
    for path in paths:
        text = path.read_bytes()
        if path.stat().st_mtime > imported:
            raise Unserial(f"{path.name} of Tessera was changed after this process imported it")
        digest.update(f"{path.relative_to(root)} {len(text)}\n".encode() + text)
    return digest.hexdigest()


@functools.cache
def _target(kind: str) -> str:
    """What compiled kernels on such a device depend on."""
    target = target_for(kind)
    about = getattr(target, "about", None)
    return f"{kind} {'' if target is None else target.name} {'' if about is None else about()}"


def _has_cuda() -> bool:
    return torch.cuda.is_available()


@functools.cache
def _about(device: torch.device) -> str:
    if device.type != "cuda" or not _has_cuda():
        return f"{device} {_has_cuda()}"
    every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    properties = [f"{p.name} {p.major}.{p.minor} {p.multi_processor_count} {p.total_memory}" for p in every]
    return f"{device} of {properties}"
