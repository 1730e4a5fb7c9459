"""From emitted cuTile text to a binary for one GPU architecture, by NVIDIA's compiler, with no GPU needed.

Binaries are kept on disk under the text, the parameters' assumptions and the architecture, so that a machine without
the compiler can run what another has built. Every binary says what it needs: registers and local memory. Local memory
means that a tile did not fit into registers, which costs more than any choice of blocks can win back.
"""

from __future__ import annotations

import importlib.util
import io
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from tessera.tile.dialect.ops import KernelOp
from tessera.tile.targets.cuda_tile.arrays import ALIGNMENT, Array, Arrays, Variant
from tessera.tile.targets.cuda_tile.functions import type_name
from tessera.util import disk as cache
from tessera.util.errors import TesseraError

KIND = "cuda_tile"  # of the cache's entries
FORMAT = "1"  # of their keys

MISSING = (
    "the CUDA Tile compiler is not installed, and no binary of this kernel for {arch} is in the cache; "
    "try: pip install 'tessera[cutile]' (or 'cuda-tile[tileiras]')"
)


class ToolchainError(TesseraError):
    """The CUDA Tile compiler is missing, or refused a kernel."""


@dataclass(frozen=True)
class Resources:
    """What one program of a binary takes."""

    registers: int
    local_bytes: int  # stack and spilled registers, a thread

    @property
    def spills(self) -> bool:
        """A few bytes are the stack of a sine's slow path; a tile that does not fit takes hundreds."""
        return self.local_bytes > 64


def available() -> bool:
    try:
        return importlib.util.find_spec("cuda.tile") is not None
    except ModuleNotFoundError:
        return False


def binary(kernel: KernelOp, source: str, arrays: Arrays, variant: Variant, arch: str) -> bytes:
    """The cubin, from the cache or from the compiler."""
    key = _key(source, arrays, variant, arch)
    cubin = cache.load(KIND, key)
    if cubin is None:
        if not available():
            raise ToolchainError(MISSING.format(arch=arch))
        cubin = _compile(kernel, source, arrays, variant, arch)
        cache.store(KIND, key, cubin)
    return cubin


def cached(source: str, arrays: Arrays, variant: Variant, arch: str) -> bool:
    return cache.load(KIND, _key(source, arrays, variant, arch)) is not None


def _key(source: str, arrays: Arrays, variant: Variant, arch: str) -> str:
    return "\n".join([FORMAT, arch, *(assumptions(a, arrays, variant) for a in arrays.all), source])


def assumptions(array: Array, arrays: Arrays, variant: Variant) -> str:
    """What the compiler is told about an array, as the text of its constraint."""
    rank = max(len(array.axes), 1)
    strides = tuple(s.constant for s in array.strides) or (1,)
    divisible = tuple(ALIGNMENT // array.itemsize if variant.aligned and s is None else 1 for s in strides)
    group = (f"buffer{array.buffer}",) if arrays.shares(array) else ()
    return (
        f"ArrayConstraint({type_name(array.element)}, {rank}, index_dtype=ct.int{64 if variant.wide else 32}, "
        f"stride_lower_bound_incl=0, alias_groups={group}, may_alias_internally={array.flat}, "
        f"stride_constant={strides}, stride_divisible_by={divisible}, "
        f"base_addr_divisible_by={ALIGNMENT if variant.aligned else array.itemsize})"
    )


def _compile(kernel: KernelOp, source: str, arrays: Arrays, variant: Variant, arch: str) -> bytes:
    import cuda.tile as ct  # only here: it is optional
    from cuda.tile import compilation as c

    names = {"ct": ct, "ArrayConstraint": c.ArrayConstraint}
    parameters = [eval(assumptions(a, arrays, variant), names) for a in arrays.all]  # our own text
    parameters += [c.ScalarConstraint(ct.int64)] * len(kernel.symbol_names)
    name = kernel.sym_name.data
    signature = c.KernelSignature(parameters, c.CallingConvention.cutile_python_v1(), symbol=name)
    out = io.BytesIO()
    try:
        function = getattr(load(source, name), name)
        c.export_kernel(function, [signature], out, gpu_code=arch, output_format="cubin")
    except Exception as error:  # the compiler's errors share no base class
        raise ToolchainError(f"cuTile refused {name} for {arch}: {error}\n\n{source}") from error
    return out.getvalue()


def load(source: str, name: str) -> ModuleType:
    """The emitted module, from a file: cuTile reads a kernel's source again."""
    path = cache.write_source("cuda_tile_source", name, source)
    spec = importlib.util.spec_from_file_location(f"tessera_cuda_tile_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# --- what a binary says about itself ---

REGISTERS, FRAME, STACK = 0x2F, 0x11, 0x12  # attributes of the section .nv.info, each (symbol, number)
SIZED = 0x04  # an attribute with its own length; the others are four bytes long


def resources(cubin: bytes) -> Resources:
    """Registers and local memory of the kernel in a cubin."""
    sizes: dict[int, int] = {}
    for name, body in _sections(cubin):
        if name != ".nv.info":
            continue
        at = 0
        while at < len(body):
            form, attribute, length = struct.unpack_from("<BBH", body, at)
            at += 4
            if form == SIZED:
                if attribute in (REGISTERS, FRAME, STACK):
                    sizes[attribute] = max(sizes.get(attribute, 0), struct.unpack_from("<II", body, at)[1])
                at += length
    return Resources(sizes.get(REGISTERS, 0), max(sizes.get(FRAME, 0), sizes.get(STACK, 0)))


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    count, names = struct.unpack_from("<HH", elf, 0x3C)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + 64 * k) for k in range(count)]
    start = headers[names][4]
    for header in headers:
        begin = start + header[0]
        yield elf[begin : elf.index(b"\0", begin)].decode(), elf[header[4] : header[4] + header[5]]
