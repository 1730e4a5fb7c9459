"""Kernels for a GPU, as an artifact keeps them: binaries that the CUDA driver launches, and how."""

from __future__ import annotations

from tessera.artifact.keep import size_data
from tessera.tile.from_trace.around import write_around
from tessera.tile.from_trace.kernel import TileKernel
from tessera.tile.targets.base import CompiledKernel
from tessera.tile.targets.pair import Pair
from tessera.tile.targets.triton.binary import Binary, compiled_for
from tessera.tile.targets.triton.launch import Launcher


class CudaKernels:
    """Binaries for one architecture, such as 90."""

    kind = "cuda"

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self._binaries: list[tuple[Binary, int, int]] = []  # with where cubin and PTX lie
        self._known: dict[bytes, int] = {}
        self._code = bytearray()

    def keep(self, kernel: TileKernel) -> dict | None:
        if kernel.segments:
            return None
        data = self._compiled(kernel.compiled)  # type: ignore[arg-type]
        return None if data is None else {**write_around(kernel.body, kernel.lowered), "kernel": data}

    def _compiled(self, compiled: CompiledKernel) -> dict | None:
        if isinstance(compiled, Pair):
            halves = [self._compiled(half) for half in (compiled.first, compiled.second)]
            if None in halves:
                return None
            if compiled.scratch:
                scratch = [[size_data(size), str(dtype).removeprefix("torch.")] for size, dtype in compiled.scratch]
            else:
                scratch = compiled.saved_scratch()
            return {"halves": halves, "scratch": scratch, "symbols": list(compiled.symbols)}
        if not isinstance(compiled, Launcher):
            return None
        binary = compiled_for(compiled, self.arch)
        if binary is None:
            return None
        return {
            "both": [self._put(binary.aligned), self._put(binary.any)],
            "programs": size_data(binary.programs),
            "persistent": binary.persistent,
            "symbols": list(compiled.symbols),
        }

    def _put(self, binary: Binary) -> int:
        if binary.cubin not in self._known:
            self._known[binary.cubin] = len(self._binaries)
            self._binaries.append((binary, self._add(binary.cubin), self._add(binary.ptx)))
        return self._known[binary.cubin]

    def _add(self, data: bytes) -> int:
        self._code += bytes(-len(self._code) % 64)
        at = len(self._code)
        self._code += data
        return at

    def code(self) -> bytes:
        return bytes(self._code)

    def listed(self) -> dict[str, object]:
        rows = [[b.name, cubin, len(b.cubin), ptx, len(b.ptx), b.shared, b.warps] for b, cubin, ptx in self._binaries]
        return {"arch": self.arch, "images": rows}
