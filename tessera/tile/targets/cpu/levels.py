"""Kinds of processors that kernels are compiled for ahead of time: what each needs, and which this machine is.

A level is an architecture and a set of instructions that all of its processors have. Kernels for a level run on every
machine of that level or a higher one. `levels_here` asks the system, not the compiler.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass
from pathlib import Path

PR_SVE_GET_VL, SVE_LENGTH = 51, 0xFFFF  # prctl's question, and where its answer holds the length
_V3 = "avx avx2 bmi1 bmi2 f16c fma movbe abm"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@dataclass(frozen=True)
class Level:
    name: str
    machine: str  # as `platform.machine` says
    triple: str
    cpu: str  # LLVM's name
    features: str  # LLVM's words
    needs: frozenset[str] = frozenset()  # Linux's words in /proc/cpuinfo
    sve: int = 0  # bytes of scalable registers, which have to be as long as that


def _x86(name: str, features: str, needs: str) -> Level:
    return Level(name, "x86_64", "x86_64-unknown-linux-gnu", name, features, frozenset(needs.split()))


def _arm(name: str, features: str, sve: int = 0) -> Level:
    return Level(name, "aarch64", "aarch64-unknown-linux-gnu", "generic", features, sve=sve)


# Best first of each architecture.
LEVELS = {
    level.name: level
    for level in (
        _x86("x86-64-v4", "+avx2,+avx512bw,+avx512cd,+avx512dq,+avx512f,+avx512vl,+bmi2,+f16c,+fma", _V4),
        _x86("x86-64-v3", "+avx2,+bmi2,+f16c,+fma", _V3),
        _x86("x86-64", "+sse2", ""),
        _arm("aarch64-sve512", "+neon,+sve", 64),
        _arm("aarch64-sve256", "+neon,+sve", 32),
        _arm("aarch64", "+neon"),
    )
}


@functools.cache
def levels_here() -> tuple[str, ...]:
    """The levels of this machine, best first; none where it is of no kind that is known."""
    machine = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    if platform.system() != "Linux":  # object files are ELF's, and Linux tells what a processor can do
        return ()
    mine = (level for level in LEVELS.values() if level.machine == machine)
    return tuple(level.name for level in mine if level.needs <= _flags() and level.sve in (0, sve_bytes()))


@functools.cache
def _flags() -> frozenset[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def sve_bytes() -> int:
    """How long this thread's scalable registers are, as Linux tells; 0 where it does not or there are none."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    answer = -1 if prctl is None else prctl(PR_SVE_GET_VL, 0, 0, 0, 0)
    return answer & SVE_LENGTH if answer > 0 else 0
