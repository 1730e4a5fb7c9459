"""The machine that kernels are compiled for, and the few instructions that only some machines have.

`Host` says what LLVM knows of a machine: how long its vector registers are, how many there are, what they can do; its
`Machine` tells the rest, such as caches. Every choice (lanes of a chunk, blocks of a product, what a function is
computed with) follows from them, and none asks for a machine by name. A `Host` can describe another machine than this
one: its code is then made and not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import llvmlite.binding as llvm

from tessera.machines import Machine
from tessera.machines.here import described_cpu
from tessera.tile.targets.cpu.code import Code, V
from tessera.tile.targets.cpu.levels import LEVELS, sve_bytes


@dataclass(frozen=True)
class Host:
    triple: str
    cpu: str
    features: str
    sve: int = 0  # bytes of an ARM machine's scalable registers, where they are longer than the others
    described: Machine | None = field(default=None, compare=False)  # else the nearest description

    @functools.cached_property
    def machine(self) -> Machine:
        return self.described or described_cpu(self.arm, 8 * self.width)

    @functools.cached_property
    def cached(self) -> int:
        """Bytes that a task goes through again while a core's second cache holds them: half of it. More than 256 KiB,
        which was measured with caches of 1 and 2 MiB, are left to the library or computed again."""
        return min(self.machine.size("l2") // 2, 256 << 10)

    @property
    def width(self) -> int:
        """Bytes of a vector register."""
        if self.arm:
            return max(self.sve, 16)
        return 64 if self.avx512 else 32 if "avx2" in self._on else 16

    @property
    def lanes(self) -> int:
        """Numbers of 32 bits in a register."""
        return self.width // 4

    @property
    def registers(self) -> int:
        return 32 if self.arm or self.avx512 else 16

    @property
    def by_lane(self) -> bool:
        """Whether one lane of a register can be a factor of all of another; others repeat an element from memory."""
        return self.arm and not self.sve

    @property
    def arm(self) -> bool:
        return self.triple.startswith(("aarch64", "arm64"))

    @functools.cached_property
    def _on(self) -> frozenset[str]:
        return frozenset(f[1:] for f in self.features.split(",") if f.startswith("+"))

    @property
    def avx512(self) -> bool:
        return {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= self._on

    @property
    def attributes(self) -> list[str]:
        """What LLVM is told of every function."""
        attributes = ['"reciprocal-estimates"="vec-divf:1"'] if self.avx512 else []
        # Registers of a known length, so that vectors of a fixed number of lanes may lie in them.
        return [*attributes, f"vscale_range({self.sve // 16},{self.sve // 16})"] if self.sve else attributes

    @property
    def fma(self) -> bool:
        return self.arm or "fma" in self._on

    @property
    def half(self) -> bool:
        """Whether float16 converts in hardware; the routines that do it otherwise may not be in the process."""
        return self.arm or "f16c" in self._on


@functools.cache
def host() -> Host:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    # Sorted, because the text is part of cache keys.
    text = ",".join(sorted(("+" if on else "-") + name for name, on in features.items()))
    sve = sve_bytes() if features.get("sve") else 0
    return Host(llvm.get_process_triple(), llvm.get_host_cpu_name(), text, sve if sve > 16 else 0)


@functools.cache
def host_of(level: str) -> Host:
    """A processor that has what the level promises, and no more."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    of = LEVELS[level]
    return Host(of.triple, of.cpu, of.features, of.sve)


class HostCode(Code):
    """LLVM text for one machine."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host

    def scalef(self, x: V, n: V) -> V:
        """x * 2^n, by AVX-512's own instruction, register by register."""
        parts = []
        for k in range(0, x.lanes, 16):
            a, by = self.part(x, k, 16), self.part(n, k, 16)
            args = [a, by, self.const("float", 0.0, 16), V("-1", "i16"), V("4", "i32")]
            parts.append(self.call_named("llvm.x86.avx512.mask.scalef.ps.512", "float", 16, args))
        return self.join(parts)

    def join(self, parts: list[V]) -> V:
        """Vectors of one length, one after another; their number is a power of two."""
        while len(parts) > 1:
            lanes = parts[0].lanes * 2
            picks = ", ".join(f"i32 {k}" for k in range(lanes))
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [self.value(f"shufflevector {a}, {b}, <{lanes} x i32> <{picks}>", a.elem, lanes) for a, b in pairs]
        return parts[0]

    def reciprocal_normal(self, x: V) -> V:
        one = self.like(x, 1.0)
        # AVX-512's estimate has 14 bits, so that one Newton step does; the flags make LLVM use it.
        flags = "arcp ninf contract " if self.host.avx512 and x.lanes >= 16 and x.elem == "float" else ""
        return self.bin(f"fdiv {flags}".strip(), one, x)

    def any(self, c: V) -> V:
        if not c.lanes:
            return c
        name = f"llvm.vector.reduce.or.v{c.lanes}i1"
        return self.call_named(name, "i1", 0, [c])

    def rarely(self, condition: V, slow: Callable[[], V], fast: V) -> V:
        """Where a condition holds, the slow value, which is computed only if it holds anywhere."""
        slot = self.slot(fast.elem, fast.lanes)
        self.store(fast, slot)
        with self.when(self.any(condition), "rare"):
            self.store(self.select(condition, slow(), fast), slot)
        return self.load(fast.elem, fast.lanes, slot)
