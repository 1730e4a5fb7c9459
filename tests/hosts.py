"""CPUs as they are described to the CPU target. Code for any of them can be made on any machine, and looked at."""

from __future__ import annotations

import llvmlite.binding as llvm

from tessera.tile.targets.cpu.host import Host

SKYLAKE = Host("x86_64-unknown-linux-gnu", "skylake-avx512", "+avx512f,+avx512dq,+avx512bw,+avx512vl,+avx2,+fma,+f16c")
HASWELL = Host("x86_64-unknown-linux-gnu", "haswell", "+avx2,+fma,+f16c")
PLAIN_X86 = Host("x86_64-unknown-linux-gnu", "x86-64", "")
NEOVERSE_N1 = Host("aarch64-unknown-linux-gnu", "neoverse-n1", "+neon")
NEOVERSE_V1 = Host("aarch64-unknown-linux-gnu", "neoverse-v1", "+neon,+sve", sve=32)

HOSTS = {
    "avx512": SKYLAKE, "avx2": HASWELL, "sse": PLAIN_X86, "neon": NEOVERSE_N1, "sve": NEOVERSE_V1,
}  # fmt: skip


def know_all_machines() -> None:
    """LLVM makes code for this machine unless it is told of the others."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
