"""What a kernel costs on a chip, found without one: Triton compiles to a cubin for any architecture anywhere.

`compile_only` is for tests, for reading the PTX, and for throwing out schedules that spill before anything is timed.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass

from tessera.tile.dialect.ops import KernelOp
from tessera.tile.dialect.types import element_of
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.triton.emit import DEFAULT, Options
from tessera.tile.targets.triton.functions import signature_name
from tessera.tile.targets.triton.launch import function_name, load_module
from tessera.tile.targets.triton.tiles import descriptor_types, write


@dataclass(frozen=True)
class Resources:
    arch: int
    registers: int  # a thread
    spills: int  # bytes of local memory a thread
    shared: int  # bytes a program
    warps: int
    ptx: str

    def __str__(self) -> str:
        return f"sm_{self.arch}: {self.registers} registers, {self.spills} B spilled, {self.shared} B shared"


def compile_only(
    kernel: KernelOp, schedule: Schedule, arch: int = 90, aligned: bool = True, options: Options = DEFAULT
) -> Resources:
    """Compile for sm_`arch`. `aligned`: pointers and symbols are multiples of 16, as for most tensors."""
    compiled = compile_for(kernel, schedule, arch, aligned, options)
    registers, spills = _usage(compiled.asm["cubin"])
    return Resources(
        arch, registers, spills, compiled.metadata.shared, compiled.metadata.num_warps, compiled.asm["ptx"]
    )


def compile_for(kernel: KernelOp, schedule: Schedule, arch: int, aligned: bool = True, options: Options = DEFAULT):
    """Triton's own compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = write(kernel, schedule, options)
    name = function_name(source)
    function = getattr(load_module(source, name), name)
    types = [f"*{signature_name(element_of(b))}" for b in kernel.buffers]
    types += [*descriptor_types(kernel, schedule), *(["i32"] * len(kernel.symbols))]
    plain = [i for i, text in enumerate(types) if not text.startswith("tensordesc")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in plain} if aligned else {}
    signature = dict(zip(function.arg_names, types, strict=True))
    return triton.compile(
        ASTSource(function, signature, constexprs={}, attrs=attributes),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": schedule.warps, "num_stages": schedule.stages},
    )


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory, from NVIDIA's own tool, which comes with Triton."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", path]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return usage.get("REG", 0), max(usage.get("STACK", 0), usage.get("LOCAL", 0))
