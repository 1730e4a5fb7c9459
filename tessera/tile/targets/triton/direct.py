"""The short way to the device: a compiled kernel launched by the addresses of its buffers.

Triton's ordinary call binds, specialises and looks up at every launch, and asks the driver about every tensor it is
handed. Where device, sizes and alignment are those that a kernel was compiled for, nothing of that can change: numbers
go straight to Triton's own launcher, called as Triton 3.6 to 3.9 call it themselves. Triton compiles a kernel anew for
every choice of buffers that begin at a multiple of 16 bytes; `alignment` says which do. What is not known yet, or
cannot be launched so, goes `through_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tessera.tile.targets.triton.descriptors import Short
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

    __slots__ = ("_described", "_device", "_hooks", "_kernel", "_programs", "_run", "_sizes", "_stream_of")

    def __init__(
        self, compiled: object, device: int, programs: int, sizes: tuple[int, ...], short: Short | None = None
    ) -> None:
        """`short`: for a kernel with descriptors. Raises AttributeError where this is another Triton than we know."""
        from triton import knobs
        from triton.runtime import driver

        run = compiled.run  # type: ignore[attr-defined]  # loads the binary, so that `function` is known
        self._run, self._described = (run, ()) if short is None else short
        self._kernel = compiled.function, compiled.packed_metadata  # type: ignore[attr-defined]
        self._stream_of, self._hooks = driver.active.get_current_stream, knobs.runtime
        self._device, self._programs, self._sizes = device, programs, sizes

    def __call__(self, addresses: Sequence[int]) -> bool:
        """Launch, or say that this call has to go the ordinary way."""
        if current_device() != self._device:
            return False
        if getattr(self._hooks.launch_enter_hook, "calls", None):  # a profiler listens
            return False
        parts: list[object] = []
        for buffer, known, make in self._described:
            address = addresses[buffer]
            parts += known.get(address) or make(address)
        run, stream = self._run, self._stream_of(self._device)
        run(self._programs, 1, 1, stream, *self._kernel, None, None, None, *addresses, *parts, *self._sizes)
        return True


def through_tensors(
    compiled, device: int, programs: int, arguments: Callable[..., tuple]
) -> Callable[..., None] | None:
    """A call of Triton's own launcher, without binding and specialising the arguments again."""
    from triton import knobs
    from triton.runtime import driver

    try:
        run = compiled.run  # loads the binary, so that `function` is known
        function, metadata, stream_of = compiled.function, compiled.packed_metadata, driver.active.get_current_stream
    except AttributeError:  # another Triton than we know
        return None

    def launch(tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> None:
        if current_device() != device:
            with torch.cuda.device(device):
                launch(tensors, sizes)
        elif getattr(knobs.runtime.launch_enter_hook, "calls", None):  # a profiler listens
            compiled[(programs, 1, 1)](*arguments(tensors, sizes))
        else:
            values = arguments(tensors, sizes)
            run(programs, 1, 1, stream_of(device), function, metadata, None, None, None, *values)

    return launch
