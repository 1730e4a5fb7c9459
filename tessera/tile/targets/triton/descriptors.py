"""Descriptors of bulk copies (TMA) that are made once, for launches that skip Triton's own making of them.

Triton takes every descriptor apart at every launch: a tensor map that the driver encodes, then sizes and strides as
numbers. These follow from the matrix's address and its geometry (sizes, strides, block, type, how blocks lie in shared
memory) alone, so they are kept by both and hold for whatever memory lies there. Triton's own functions take descriptors
apart; `prepared` gives None where this is another Triton than we know, or something in it is not what we know.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

KNOWN = ("3.6.", "3.7.", "3.8.", "3.9.")  # versions of Triton
MOST = 4096  # descriptors that a kernel keeps


class Matrix:
    """A buffer as descriptors see it: no memory is held."""

    __slots__ = ("address", "dtype", "number")

    def __init__(self, number: int, address: int, dtype: torch.dtype) -> None:
        self.number, self.address, self.dtype = number, address, dtype

    def data_ptr(self) -> int:
        return self.address


class Kept:
    """What a kernel's descriptors became, by geometry and then by address; all go where they are too many."""

    def __init__(self) -> None:
        self._of: dict[tuple, dict[int, tuple]] = {}
        self._count = 0

    def of(self, geometry: tuple) -> dict[int, tuple]:
        return self._of.setdefault(geometry, {})

    def add(self, known: dict[int, tuple], address: int, parts: tuple) -> None:
        if self._count >= MOST:
            for each in list(self._of.values()):  # another thread may add one
                each.clear()
            self._count = 0
        known[address] = parts
        self._count += 1


class Described(NamedTuple):
    """One descriptor of a kernel at certain sizes."""

    buffer: int  # whose address it needs
    known: dict[int, tuple]  # by address
    make: Callable[[int], tuple]  # what is not known yet


class Short(NamedTuple):
    run: Callable[..., None]  # like a compiled kernel's `run`, with descriptors' parts in place of descriptors
    described: tuple[Described, ...]


def prepared(
    compiled: object,
    device: int,
    make: Callable[..., tuple],
    addresses: Sequence[int],
    dtypes: Sequence[torch.dtype],
    sizes: tuple[int, ...],
    kept: Kept,
) -> Short | None:
    """`make` gives the descriptors of buffers and sizes. What is made here is compared with what Triton would make."""
    import triton
    from triton.backends.nvidia import driver

    if not triton.__version__.startswith(KNOWN):
        return None
    run = compiled.run  # type: ignore[attr-defined]
    metas = getattr(compiled.metadata, "tensordesc_meta", None)  # type: ignore[attr-defined]
    signature = compiled.src.signature  # type: ignore[attr-defined]
    types = [t for t in signature.values() if isinstance(t, str) and t.startswith("tensordesc")]
    launch = _behind(getattr(run, "launch", None))
    if type(run) is not driver.CudaLauncher or launch is None or not metas or len(metas) != len(types):
        return None
    buffers = [Matrix(i, a, d) for i, (a, d) in enumerate(zip(addresses, dtypes, strict=True))]
    descriptors = make(*buffers, *sizes)
    if len(descriptors) != len(types) or not all(hasattr(d, "__dict__") for d in descriptors):
        return None
    described = tuple(
        _described(d, (device, text, repr(meta)), _apart({0: text}, [meta]), kept)
        for d, text, meta in zip(descriptors, types, metas, strict=True)
    )
    ours = [*addresses, *(part for d in described for part in d.make(addresses[d.buffer])), *sizes]
    theirs = _apart(signature, metas)(*addresses, *descriptors, *sizes)
    if not _same(ours, theirs):
        return None
    run = copy.copy(run)
    run.launch = launch
    return Short(run, described)


def _described(descriptor, compiled_as: tuple, apart: Callable[..., Sequence], kept: Kept) -> Described:
    kind, matrix = type(descriptor), descriptor.base
    geometry = {name: value for name, value in vars(descriptor).items() if name != "base"}
    known = kept.of((*compiled_as, repr(geometry)))

    def make(address: int) -> tuple:
        moved = object.__new__(kind)  # what its class asks of a geometry has been asked
        moved.__dict__ = {**geometry, "base": Matrix(matrix.number, address, matrix.dtype)}
        parts = tuple(apart(moved))
        kept.add(known, address, parts)
        return parts

    return Described(matrix.number, known, make)


def _apart(signature: dict, metas: list) -> Callable[..., Sequence]:
    """Takes descriptors among arguments apart: Triton's wrapper, around a launcher that only gives them back."""
    from triton.backends.nvidia import driver

    wrapped = driver.wrap_handle_tensordesc(lambda *args: args, signature, metas)
    before = getattr(driver, "_BASE_ARGS_FORMAT_LEN", None)
    if before is None:  # since Triton 3.7 the kernel's arguments are one
        return lambda *arguments: wrapped(arguments)[-1]
    return lambda *arguments: wrapped(*(None,) * before, *arguments)[before:]


def _behind(wrapped: object) -> Callable | None:
    """The launcher that Triton wraps into one that takes descriptors apart."""
    return inspect.getclosurevars(wrapped).nonlocals.get("launcher") if inspect.isfunction(wrapped) else None


def _same(ours: Sequence, theirs: Sequence) -> bool:
    """Tensor maps show nothing but their type."""
    pairs = list(zip(ours, theirs, strict=False))
    return len(ours) == len(theirs) and all(type(a) is type(b) and (a == b or not isinstance(a, int)) for a, b in pairs)
