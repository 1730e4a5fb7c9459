"""Kernels as pieces of code that run wherever they lie: what an artifact holds of a CPU kernel.

In: images, which `link.py` made of object files. Out: Python functions. An image is bytes that refer to each other by
distance alone, where its entry is, and which of its slots hold the address of which symbol of the process. All images
of a program are put behind each other into one file in memory, slots filled in, and that is mapped to be run: memory is
never writable and executable at once. Only images of a file that is trusted come here.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy
import torch

from tessera.tile.targets.cpu.process import address_of, function

PAGE = 4096  # code addresses its own data by pages of this size; an image begins at one
SLOT = 8  # bytes of an address


@dataclass(frozen=True)
class Image:
    name: str
    code: bytes
    entry: int
    imports: tuple[tuple[int, str], ...]  # (where its address is wanted, symbol)


@dataclass(frozen=True, slots=True)
class MappedKernel:
    """Call it with tensors and sizes; `by_address` takes the tensors' addresses directly."""

    name: str
    by_address: Callable[..., None]
    alive: object
    source: str = ""

    def __call__(self, tensors: Sequence[torch.Tensor], symbols: Sequence[int] = ()) -> None:
        self.by_address(*[t.data_ptr() for t in tensors], *symbols)


def missing_symbols(images: Sequence[Image]) -> list[str]:
    """What the images call and this process does not have."""
    return sorted({symbol for image in images for _, symbol in image.imports if not address_of(symbol)})


def mapped(images: Sequence[Image]) -> list[MappedKernel]:
    """The kernels of these images. An OSError says that this system maps no code."""
    code, starts = bytearray(), []
    for image in images:
        starts.append(len(code))
        code += image.code + bytes(-len(image.code) % PAGE)
        for offset, symbol in image.imports:
            at = starts[-1] + offset
            code[at : at + SLOT] = address_of(symbol).to_bytes(SLOT, "little")
    with _file_in_memory() as file:
        file.write(code)
        file.flush()
        pages = mmap.mmap(file.fileno(), len(code), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    base = numpy.frombuffer(pages, numpy.uint8).ctypes.data
    kernels = []
    for image, start in zip(images, starts, strict=True):
        run, method = function(base + start + image.entry, image.name)
        kernels.append(MappedKernel(image.name, run, (method, pages)))
    return kernels


def _file_in_memory() -> BinaryIO:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tessera-kernels", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile()  # type: ignore[return-value]
