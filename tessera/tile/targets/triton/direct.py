"""The short way to the device: a compiled kernel launched by the addresses of its buffers.

Triton's ordinary call binds, specialises and looks up at every launch, and asks the driver about every tensor it is
handed. Where device, sizes and alignment are those that a kernel was compiled for, nothing of that can change: numbers
go straight to Triton's own launcher, called as Triton 3.6 to 3.9 call it themselves. Triton compiles a kernel anew for
every choice of buffers that begin at a multiple of 16 bytes; `alignment` says which do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tessera.torch_internals import cuda
from tessera.torch_internals.memory import empty_cuda as empty_cuda

current_device: Callable[[], int] = cuda.current_device or torch.cuda.current_device
UNALIGNED = 15  # bits that an aligned address does not have
Alignment = tuple[bool, ...]  # of each buffer; nothing where all are aligned


def alignment(addresses: Sequence[int]) -> Alignment:
    bits = 0
    for address in addresses:
        bits |= address
    return tuple([not address & UNALIGNED for address in addresses]) if bits & UNALIGNED else ()


class Direct:
    """One kernel on one device for one set of sizes and one alignment of its buffers."""

    __slots__ = ("_device", "_function", "_hooks", "_metadata", "_programs", "_run", "_sizes", "_stream_of")

    def __init__(self, compiled: object, device: int, programs: int, sizes: tuple[int, ...]) -> None:
        """Raises AttributeError where this is another Triton than we know."""
        from triton import knobs
        from triton.runtime import driver

        self._run = compiled.run  # type: ignore[attr-defined]  # loads the binary, so that `function` is known
        self._function, self._metadata = compiled.function, compiled.packed_metadata  # type: ignore[attr-defined]
        self._stream_of, self._hooks = driver.active.get_current_stream, knobs.runtime
        self._device, self._programs, self._sizes = device, programs, sizes

    def __call__(self, addresses: Sequence[int]) -> bool:
        """Launch, or say that this call has to go the ordinary way."""
        if current_device() != self._device:
            return False
        if getattr(self._hooks.launch_enter_hook, "calls", None):  # a profiler listens
            return False
        stream = self._stream_of(self._device)
        run = self._run
        run(self._programs, 1, 1, stream, self._function, self._metadata, None, None, None, *addresses, *self._sizes)
        return True
