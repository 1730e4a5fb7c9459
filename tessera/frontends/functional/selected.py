"""Rows that a mask selects, `x[mask]`, while a program is traced whose sizes must be known.

In: a block of code that runs under a recorder. What it selects is recorded as `tessera.selected_rows(x, mask)`, with as
many rows as `Selecting` says: a number that stands for how many there are, another one for each mask. Programs that
were traced with several such numbers show by their differences where it counts
(`transforms/selected_rows.py`, which writes them over all rows before anything runs).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tessera.frontends.functional.trace import tracing
from tessera.ir.decided import decided
from tessera.ir.equation import Value, map_values
from tessera.ir.record import Recorder, recording
from tessera.ir.schema import draws
from tessera.ir.types import TensorType, contiguous_strides
from tessera.torch_internals.dispatch import disable_current_modes
from tessera.transforms.selected_rows import SELECTED, SPREAD
from tessera.util.errors import CaptureError

READS = (torch.masked_select, Tensor.masked_select)
COPIES = (torch.masked_scatter, Tensor.masked_scatter)
WRITES = (Tensor.masked_scatter_, *COPIES)
SIZES = (99991, 99989, 99971, 99961, 99929, 99923, 99907, 99901)  # primes, which no other size is made of


class Selecting(TorchFunctionMode):
    """`times`: how often the number of rows is counted. `few`: how many rows all masks select, in place of such
    numbers. `met`: masks, and the number of each."""

    def __init__(self, times: int = 1, few: int | None = None) -> None:
        super().__init__()
        self.times, self.few, self.met = times, few, dict[str, int]()

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        recorder, kwargs = recording(), kwargs or {}
        reads = func in (Tensor.__getitem__, *READS)  # while a program is traced, other functions stand there
        if recorder is not None and tracing() and (reads or func in (Tensor.__setitem__, *WRITES)):
            asked = _asked(func, args, kwargs)
            if asked is not None and _fits(asked.part, asked.mask):
                part, mask, dim = asked.part, asked.mask, asked.dim
                if reads:
                    return self.rows(recorder, part, mask).movedim(0, dim)
                source = args[2] if len(args) > 2 else kwargs.get("source")
                if isinstance(source, Tensor) and dim < source.ndim and part.ndim - mask.ndim + 1 == source.ndim:
                    source = source.movedim(dim, 0)
                size = self.size_of(recorder, mask)
                if size is not None and self.are_rows(source, part, mask, size):
                    new = _spread(recorder, part, mask, source, size)  # type: ignore[arg-type]
                    return new if func in COPIES else part.copy_(new)
        return func(*args, **kwargs)

    def size_of(self, recorder: Recorder, mask: Tensor) -> int | None:
        """What stands for the number of its rows, if some were read."""
        return self.met.get(_key(recorder, recorder.value(mask))) if self.met else None

    def are_rows(self, source: object, x: Tensor, mask: Tensor, size: int) -> bool:
        """Can they be rows that the mask selects of x, or one for all of them?"""
        if not isinstance(source, Tensor) or source.dtype != x.dtype or source.ndim != x.ndim - mask.ndim + 1:
            return False
        return source.shape[0] in (1, self.count(size))

    def count(self, size: int) -> int:
        return size * self.times if self.few is None else self.few

    def rows(self, recorder: Recorder, x: Tensor, mask: Tensor) -> Tensor:
        v = recorder.value(mask)
        known = decided(recorder.builder, v)
        if known is not None:
            with disable_current_modes():
                places = known.flatten().nonzero().flatten()
            return x.flatten(0, mask.ndim - 1).index_select(0, places)
        key = _key(recorder, v)
        if key not in self.met and len(self.met) == len(SIZES):
            raise CaptureError(f"x[mask]: expected at most {len(SIZES)} different masks in one program")
        size = self.met.setdefault(key, SIZES[len(self.met) % len(SIZES)])
        shape = (self.count(size), *x.shape[mask.ndim :])
        type_ = TensorType(x.dtype, shape, contiguous_strides(shape), x.device)
        (out,) = recorder.special(SELECTED, (x, mask), {}, [type_])
        return out


@dataclass(frozen=True)
class _Asked:
    """`part` of a tensor, whose first dimensions a mask selects from; rows of it stand at `dim` of the result."""

    part: Tensor
    mask: Tensor
    dim: int = 0


def _asked(func: Callable, args: tuple, kwargs: dict) -> _Asked | None:
    if func not in (Tensor.__getitem__, Tensor.__setitem__):
        x, mask = args[0], args[1] if len(args) > 1 else kwargs.get("mask")
        return _Asked(*torch.broadcast_tensors(x, mask)) if isinstance(mask, Tensor) else None
    x, index = args[:2]
    index = index if isinstance(index, tuple) else (index,)
    tensors = [i for i, at in enumerate(index) if not (at is None or at is ... or type(at) in (int, slice))]
    if len(tensors) != 1 or not isinstance(mask := index[tensors[0]], Tensor) or mask.dtype != torch.bool:
        return None
    before, behind = index[: tensors[0]], index[tensors[0] + 1 :]
    left = x.ndim - mask.ndim - sum(at is not None and at is not ... for at in (*before, *behind))
    before, behind = _spelled_out(before, left), _spelled_out(behind, left)
    every = slice(None)
    if not any(at != every for at in (*before, *behind)):
        part, dim = x, len(before)
    else:
        part = x[(*before, *(every for _ in mask.shape), *behind)]
        dim = sum(type(at) is not int for at in before)
    places = range(mask.ndim)
    return _Asked(part.movedim([dim + i for i in places], [*places]) if dim else part, mask, dim)


def _spelled_out(index: tuple, left: int) -> tuple:
    """`...` as so many slices."""
    return tuple(part for at in index for part in ([slice(None)] * left if at is ... else [at]))


def _spread(recorder: Recorder, x: Tensor, mask: Tensor, rows: Tensor, size: int) -> Tensor:
    type_ = TensorType(x.dtype, tuple(x.shape), contiguous_strides(x.shape), x.device)
    (out,) = recorder.special(SPREAD, (x, mask, rows, size), {}, [type_])
    return out


def _fits(x: Tensor, mask: Tensor) -> bool:
    return mask.dtype == torch.bool and mask.ndim > 0 and x.shape[: mask.ndim] == mask.shape


def _key(recorder: Recorder, v: Value) -> str:
    """The same text for masks that are made alike."""
    makers = {out: eqn for eqn in recorder.builder.equations for out in eqn.results()}
    known: dict[Value, str] = {}

    def text(v: Value) -> str:
        if v not in known:
            eqn = makers.get(v)
            alone = eqn is None or draws(eqn.op, eqn.args, eqn.kwargs)
            made = v.name if alone else f"{eqn.op}{map_values((eqn.args, eqn.kwargs), text)}{eqn.results().index(v)}"
            known[v] = hashlib.sha256(made.encode()).hexdigest()
        return known[v]

    return text(v)
