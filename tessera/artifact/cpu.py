"""CPU kernels of a file: whether they fit this machine, and ready to run."""

from __future__ import annotations

from tessera.artifact.container import Container
from tessera.artifact.regions import Halves
from tessera.ir.serial_check import NAME
from tessera.tile.targets.base import CompiledKernel
from tessera.tile.targets.cpu.image import PAGE, SLOT, Image, MappedKernel, mapped, missing_symbols
from tessera.tile.targets.cpu.levels import levels_here
from tessera.tile.targets.cpu.process import openmp
from tessera.util.errors import ArtifactError, Unserial


class CpuKernels:
    def __init__(self, kernels: list[MappedKernel]) -> None:
        self.kernels = kernels

    def kernel(self, data: object) -> CompiledKernel | None:
        match data:
            case {"image": int(number)}:
                return self._at(number)
            case {"halves": [int(first), int(second)], "scratch": scratch, "symbols": symbols}:
                return Halves(self._at(first), self._at(second), scratch, symbols)
        raise Unserial(f"expected a CPU kernel, got {str(data)[:80]}")

    def _at(self, number: int) -> MappedKernel:
        if not 0 <= number < len(self.kernels):
            raise Unserial(f"expected one of {len(self.kernels)} kernels, got {number}")
        return self.kernels[number]


def misfit(target: dict) -> str:
    """Why the kernels of this target do not run here; empty where they do."""
    level = target.get("level")
    if level not in levels_here():
        return f"they are for {str(level)[:40]}; this machine is {' or '.join(levels_here()) or 'of no known kind'}"
    if target.get("openmp") != openmp():
        return f"they call the OpenMP runtime {str(target.get('openmp'))[:40]!r}; PyTorch brings {openmp()!r} here"
    return ""


def rank(target: dict) -> int:
    """Of those that fit the least is the best: it uses most of the processor."""
    return levels_here().index(target["level"])


def ready(container: Container, name: str, target: dict) -> CpuKernels:
    """The kernels, mapped. An ArtifactError says what is wrong with the file, an OSError what with the machine."""
    where = f"{container.path}: targets[{name}]"
    code = container.read(target.get("code"))
    listed = target.get("images")
    if not isinstance(listed, list):
        raise ArtifactError(f"{where}: expected a list of images")
    images = [_image(row, code, where) for row in listed]
    if missing := missing_symbols(images):
        raise OSError(f"{where}: this process has no {missing[0]}")
    return CpuKernels(mapped(images) if images else [])


def _image(row: object, code: bytes, where: str) -> Image:
    match row:
        case [str(name), int(at), int(size), int(entry), list(imports)] if NAME.fullmatch(name):
            fits = at % PAGE == 0 and at >= 0 and size > 0 and at + size <= len(code) and 0 <= entry < size
            if fits and all(_import(pair, size) for pair in imports):
                return Image(name, code[at : at + size], entry, tuple((slot, symbol) for slot, symbol in imports))
    raise ArtifactError(f"{where}: expected an image within {len(code)} bytes of code, got {str(row)[:120]}")


def _import(pair: object, size: int) -> bool:
    match pair:
        case [int(slot), str(symbol)]:
            return 0 <= slot <= size - SLOT and NAME.fullmatch(symbol) is not None
    return False
