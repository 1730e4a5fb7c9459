"""The machine that kernels are compiled for, and the few instructions that only some machines have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import llvmlite.binding as llvm

from tessera.tile.targets.cpu.code import Code, V


@dataclass(frozen=True)
class Host:
    triple: str
    cpu: str
    features: str
    width: int  # bytes of a vector register

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
    wide = 64 if features.get("avx512f") and features.get("avx512vl") else 32 if features.get("avx2") else 16
    # Sorted, because the text is part of cache keys.
    text = ",".join(sorted(("+" if on else "-") + name for name, on in features.items()))
    return Host(llvm.get_process_triple(), llvm.get_host_cpu_name(), text, wide)


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
