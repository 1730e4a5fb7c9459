"""Kernels of this target as binaries that the CUDA driver launches: compiled ahead, for a GPU that need not be here.

In: what `launch.launcher` made, and an architecture. Out: `Binary`s. A kernel without symbols is compiled as it would
be on the device; one with symbols with offsets of 64 bits and a loop wherever a row may not fit one block, since nobody
can choose another variant later. Each comes twice: for pointers that are multiples of 16, and for any.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tessera.tile.dialect.elements import element_of_dtype
from tessera.tile.dialect.index import Index
from tessera.tile.schedules.schedule import reduced_axis
from tessera.tile.targets.triton.functions import signature_name
from tessera.tile.targets.triton.launch import Launcher, Variant
from tessera.tile.targets.triton.layout import layout

ARCHITECTURE_ONLY = re.compile(r"\.target sm_\d+[af]")  # PTX that runs on no other architecture


@dataclass(frozen=True)
class Binary:
    name: str
    cubin: bytes
    ptx: bytes  # empty where it would run nowhere else
    shared: int
    warps: int


@dataclass(frozen=True)
class Compiled:
    aligned: Binary
    any: Binary
    programs: Index
    persistent: bool  # as many programs as run side by side, at most


def compiled_for(launcher: Launcher, arch: int) -> Compiled | None:
    """None where a binary alone would not do."""
    variant = _variant(launcher)
    both = [_compile(launcher, variant, arch, aligned) for aligned in (True, False)]
    if both[0] is None or both[1] is None:
        return None
    programs = layout(launcher.kernel, launcher.schedule).programs
    return Compiled(both[0], both[1], programs, launcher.schedule.persistent)


def _variant(launcher: Launcher) -> Variant:
    if not launcher.symbols:
        needs = launcher.needed(())
        return launcher.variant(needs.loop, needs.wide)
    axis = reduced_axis(launcher.kernel)
    size = None if axis is None else launcher.kernel.axis(axis).size.expr.constant
    if axis is None or launcher.schedule.loop:
        loop = False
    elif size is None:
        loop = True
    else:
        loop = launcher.needs_loop({})
    return launcher.variant(loop, True)


def _compile(launcher: Launcher, variant: Variant, arch: int, aligned: bool) -> Binary | None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = [f"*{signature_name(element_of_dtype(d))}" for d in launcher.dtypes]
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(types))} if aligned else {}
    types += ["i64"] * len(launcher.symbols)
    function = variant.function
    source = ASTSource(function, dict(zip(function.arg_names, types, strict=True)), constexprs={}, attrs=attributes)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    metadata = compiled.metadata
    if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "num_ctas", 1) != 1:
        return None
    ptx = compiled.asm["ptx"]
    portable = b"" if ARCHITECTURE_ONLY.search(ptx) else ptx.encode() + b"\0"
    return Binary(metadata.name, compiled.asm["cubin"], portable, metadata.shared, metadata.num_warps)
