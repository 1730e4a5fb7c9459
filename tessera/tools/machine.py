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
        simd=_simd(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        python=platform.python_version(),
        torch=torch.__version__,
    )


def cxx_compiler() -> str | None:
    """The C++ compiler that TorchInductor would find, if there is one."""
    candidates = (os.environ.get("CXX"), "g++", "clang++")
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


# Arm's own cores by their part numbers, as /proc/cpuinfo gives them.
_ARM_CORES = {
    0xD0C: "Neoverse N1", 0xD40: "Neoverse V1", 0xD49: "Neoverse N2", 0xD4F: "Neoverse V2", 0xD8E: "Neoverse N3",
    0xD84: "Neoverse V3", 0xD0B: "Cortex-A76", 0xD08: "Cortex-A72",
}  # fmt: skip


def _cpu_name() -> str:
    known = _cpuinfo()
    if "model name" in known:
        return known["model name"]
    if known.get("CPU implementer") == "0x41" and (part := int(known.get("CPU part", "0"), 16)) in _ARM_CORES:
        return f"Arm {_ARM_CORES[part]}"
    return platform.processor() or platform.machine()


def _simd() -> str:
    """The vector instructions there are; PyTorch calls every Arm without SVE "DEFAULT"."""
    capability = torch.backends.cpu.get_cpu_capability()
    return "NEON" if capability == "DEFAULT" and platform.machine() in ("aarch64", "arm64") else capability


def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first core."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    pairs = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    return dict(reversed(pairs))
