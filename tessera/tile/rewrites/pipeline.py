"""The passes by name, and the order in which kernels go through them.

A pass takes a kernel and changes it in place; it never changes how the kernel is called. The kernel is verified
after every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tessera.tile.dialect.ops import KernelOp
from tessera.tile.rewrites.canonicalise import canonicalise
from tessera.tile.rewrites.cse import cse
from tessera.tile.rewrites.dce import dce
from tessera.tile.rewrites.fma import fma
from tessera.tile.rewrites.offline import offline
from tessera.tile.rewrites.one_hot import one_hot
from tessera.tile.rewrites.online import online
from tessera.util.errors import OptionError

PASSES: dict[str, Callable[[KernelOp], None]] = {
    p.__name__: p for p in (canonicalise, cse, dce, fma, offline, one_hot, online)
}

# cse before dce: it leaves nothing dead itself, but equal operands make more operations equal.
PIPELINE: tuple[str, ...] = ("canonicalise", "cse", "dce")


def optimise(kernel: KernelOp, passes: Sequence[str] = PIPELINE) -> KernelOp:
    """Run the named passes in order; the kernel itself comes back."""
    for name in passes:
        if name not in PASSES:
            raise OptionError(f"expected one of the passes {', '.join(PASSES)}, got {name!r}")
        PASSES[name](kernel)
        kernel.verify()
    return kernel
