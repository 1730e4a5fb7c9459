"""GPU kernels of a file: whether they fit the device, and ready to be launched by the CUDA driver."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.artifact.container import Container
from tessera.artifact.regions import Halves
from tessera.ir.formula import Formula, Formulas
from tessera.ir.serial_check import NAME
from tessera.tile.targets.base import CompiledKernel
from tessera.tile.targets.driver import Binary
from tessera.util.errors import ArtifactError, Unserial

ALIGNED = 15  # bits that an aligned address does not have
WARP = 32
MOST_SHARED, MOST_WARPS = 1 << 20, 32


class CudaKernel:
    """Call it with tensors on the device and sizes; it goes to the current stream."""

    source = ""

    def __init__(self, both: tuple[Loadable, Loadable], programs: int | Formula, symbols: list[str], most: int) -> None:
        """`both`: for aligned pointers, and for any. `most`: programs, where the kernel shares its work out to as many
        as there are; 0: no bound."""
        self.aligned, self.other = both
        self.programs, self.symbols, self.most = programs, symbols, most

    def __call__(self, tensors: Sequence[torch.Tensor], symbols: Sequence[int] = ()) -> None:
        programs = self.programs
        if isinstance(programs, Formula):
            programs = programs.value(dict(zip(self.symbols, symbols, strict=True)))
        if programs <= 0:
            return
        if self.most:
            programs = min(programs, self.most)
        pointers = [t.data_ptr() for t in tensors]
        bits = 0
        for p in pointers:
            bits |= p
        chosen = self.other if bits & ALIGNED else self.aligned
        # Two more, for scratch memory that these kernels do not use: the driver reads as many as a kernel has.
        chosen.binary().launch(programs, chosen.threads, [*pointers, *symbols, 0, 0])


class Loadable:
    """A binary that is loaded when it is first launched."""

    def __init__(self, name: str, image: bytes, shared: int, warps: int, device: torch.device) -> None:
        self.name, self.image, self.shared, self.threads, self.device = name, image, shared, warps * WARP, device
        self._binary: Binary | None = None

    def binary(self) -> Binary:
        if self._binary is None:
            self._binary = Binary(self.image, self.name, self.device, self.shared)
        return self._binary


class CudaKernels:
    def __init__(self, binaries: list[Loadable], units: int) -> None:
        self.binaries, self.units = binaries, units

    def kernel(self, data: object) -> CompiledKernel | None:
        match data:
            case {"halves": [dict(first), dict(second)], "scratch": scratch, "symbols": symbols}:
                one, two = self.kernel(first), self.kernel(second)
                assert one is not None and two is not None
                return Halves(one, two, scratch, symbols)
            case {"both": [int(one), int(other)], "programs": size, "persistent": bool(p), "symbols": list(names)}:
                if all(isinstance(n, str) for n in names):
                    both, programs = (self._at(one), self._at(other)), Formulas(names).read(size)
                    return CudaKernel(both, programs, names, self.units if p else 0)
        raise Unserial(f"expected a CUDA kernel, got {str(data)[:80]}")

    def _at(self, number: int) -> Loadable:
        if not 0 <= number < len(self.binaries):
            raise Unserial(f"expected one of {len(self.binaries)} binaries, got {number}")
        return self.binaries[number]


def misfit(target: dict, device: torch.device) -> str:
    """Why the kernels of this target do not run on the device; empty where they do."""
    arch, here = target.get("arch"), _capability(device)
    if arch == here or (isinstance(arch, int) and arch < here and all(row[4] for row in _rows(target))):
        return ""
    return f"they are for sm_{str(arch)[:8]}; {device} is sm_{here}"


def rank(target: dict) -> int:
    """Of those that fit the least is the best: the device's own architecture, or the nearest before it."""
    return -target["arch"]


def ready(container: Container, name: str, target: dict, device: torch.device) -> CudaKernels:
    where = f"{container.path}: targets[{name}]"
    code = container.read(target.get("code"))
    exact = target.get("arch") == _capability(device)
    binaries = [_binary(row, code, exact, device, where) for row in _rows(target)]
    return CudaKernels(binaries, torch.cuda.get_device_properties(device).multi_processor_count)


def _rows(target: dict) -> list[list]:
    rows = target.get("images")
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 7 for row in rows):
        raise ArtifactError("targets: expected a list of binaries")
    return rows


def _binary(row: list, code: bytes, exact: bool, device: torch.device, where: str) -> Loadable:
    """The cubin where the device is of its architecture; else the PTX, which the driver compiles."""
    match row:
        case [str(name), int(cubin), int(size), int(ptx), int(length), int(shared), int(warps)]:
            at, count = (cubin, size) if exact else (ptx, length)
            inside = at >= 0 and count > 0 and at + count <= len(code)
            bounds = 0 <= shared <= MOST_SHARED and 0 < warps <= MOST_WARPS
            if NAME.fullmatch(name) and inside and bounds:
                return Loadable(name, code[at : at + count], shared, warps, device)
    raise ArtifactError(f"{where}: expected a binary within {len(code)} bytes, got {str(row)[:120]}")


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
