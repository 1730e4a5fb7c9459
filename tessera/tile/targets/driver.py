"""The CUDA driver, which every machine with a GPU has: binaries are loaded and launched with nothing else."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from tessera.util.errors import TesseraError

DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
STATIC_LIMIT = 48 << 10  # bytes of shared memory that a kernel has without asking


class DriverError(TesseraError):
    """The CUDA driver refused a binary or a launch."""


class Binary:
    """One kernel of a loaded binary, on one device."""

    def __init__(self, cubin: bytes, name: str, device: torch.device, shared: int = 0) -> None:
        self.device, self.shared = device, shared
        self.module, self.handle = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):  # its context is current in here
            call("cuModuleLoadData", ctypes.byref(self.module), cubin)
            call("cuModuleGetFunction", ctypes.byref(self.handle), self.module, name.encode())
            if shared > STATIC_LIMIT:
                call("cuFuncSetAttribute", self.handle, DYNAMIC_SHARED, shared)

    def launch(self, programs: int, threads: int, arguments: Sequence[int]) -> None:
        """On the current stream of the device, which is the current one. Arguments are numbers of 64 bits."""
        count = len(arguments)
        values = (ctypes.c_uint64 * count)(*(a & 0xFFFFFFFFFFFFFFFF for a in arguments))
        base = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * count)(*range(base, base + 8 * count, 8))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        call("cuLaunchKernel", self.handle, programs, 1, 1, threads, 1, 1, self.shared, stream, pointers, None)


@functools.cache
def library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"expected the CUDA driver (libcuda.so.1) on this machine, got: {error}") from None


def call(name: str, *arguments: object) -> None:
    code = getattr(library(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{name} failed: {(text.value or b'unknown error').decode()} ({code})")
