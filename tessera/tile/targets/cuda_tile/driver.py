"""Loads and launches binaries through the CUDA driver, which every machine with a GPU has: nothing else is needed.

A tile kernel is launched with one thread a program, whatever the binary really uses: the driver knows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from tessera.tile.targets.cuda_tile.arrays import Placed
from tessera.tile.targets.driver import call


class Function:
    """One kernel of a loaded binary, on one device."""

    def __init__(self, cubin: bytes, name: str, device: torch.device) -> None:
        self.device = device
        self.module, self.handle = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):  # its context is current in here
            call("cuModuleLoadData", ctypes.byref(self.module), cubin)
            call("cuModuleGetFunction", ctypes.byref(self.handle), self.module, name.encode())

    def launch(self, programs: int, arguments: Sequence[ctypes._SimpleCData]) -> None:
        """On the current stream of the device."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        with torch.cuda.device(self.device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
            call("cuLaunchKernel", self.handle, programs, 1, 1, 1, 1, 1, 0, stream, pointers, None)


def pack(placed: Sequence[Placed], symbols: Sequence[int], wide: bool) -> list[ctypes._SimpleCData]:
    """Arguments as cuTile's calling convention wants them: address, sizes, strides of every array; then the symbols."""
    size = ctypes.c_int64 if wide else ctypes.c_int32
    arguments: list[ctypes._SimpleCData] = []
    for p in placed:
        arguments += [ctypes.c_uint64(p.address), *map(size, p.shape), *map(size, p.strides)]
    return arguments + [ctypes.c_int64(n) for n in symbols]
