"""What the code runs on, in a few plain fields: every measurement and every report of trouble carries it."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """The facts that decide whether two measurements may be compared."""

    cpu: str
    cores: int
    simd: str
    gpu: str | None
    python: str
    torch: str

    def __str__(self) -> str:
        parts = [
            f"{self.cpu} ({self.simd})",
            f"{self.cores} cores",
            f"torch {self.torch}",
            f"Python {self.python}",
        ]
        return ", ".join(parts + ([self.gpu] if self.gpu else []))


def machine() -> Machine:
    """Describe this machine."""
    return Machine(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        simd=torch.backends.cpu.get_cpu_capability(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        python=platform.python_version(),
        torch=torch.__version__,
    )


def cxx_compiler() -> str | None:
    """The C++ compiler that TorchInductor would find, if there is one."""
    candidates = (os.environ.get("CXX"), "g++", "clang++")
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
