"""Tensors to run a program on when the user's own data is not at hand, or must not be written down.

In: a type, a seed, and the range that the real numbers had where it is known. Out: a tensor of that dtype, shape,
strides and device; the same arguments give the same numbers everywhere. Integers are zeros unless a range is given:
zero is a valid index of anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.ir.equation import Value
from tessera.ir.trace import Trace
from tessera.ir.types import ScalarType, TensorType, size_hint
from tessera.util.errors import InputError

Range = tuple[float, float]


def example(
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    between: Range | None = None,
) -> torch.Tensor:
    """Normal numbers, or uniform ones in a range."""
    generator = torch.Generator().manual_seed(seed)
    extent = _extent(shape, stride)
    if dtype.is_complex:
        memory = torch.randn(extent, dtype=torch.complex64, generator=generator)
    elif dtype.is_floating_point:
        memory = torch.randn(extent, generator=generator)
        if between is not None:
            low, high = between
            memory = low + (high - low) * torch.rand(extent, generator=generator)
    else:
        low, high = (0, 0) if between is None else (int(between[0]), int(between[1]))
        memory = torch.randint(low, high + 1, (extent,), generator=generator)
    values = memory.to(device=device, dtype=dtype)
    return values.reshape(tuple(shape)) if stride is None else values.as_strided(tuple(shape), tuple(stride))


def _extent(shape: Sequence[int], stride: Sequence[int] | None) -> int:
    if 0 in shape:
        return 0
    if stride is None:
        return int(torch.Size(shape).numel())
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def example_inputs(trace: Trace, seed: int = 0, ranges: dict[str, Range] | None = None) -> list[object]:
    """Something to call the trace with."""
    return [_of(v, trace, seed + i, (ranges or {}).get(v.name)) for i, v in enumerate(trace.inputs)]


def _of(v: Value, trace: Trace, seed: int, between: Range | None) -> object:
    match v.type:
        case TensorType(layout=torch.strided) as t:
            shape, stride = ([size_hint(n) for n in sizes] for sizes in (t.shape, t.stride))
            return example(shape, stride, t.dtype, str(t.device), seed, between)
        case ScalarType():
            return number_hint(v, trace)
    raise InputError(f"expected tensors and numbers as inputs, got {v.name}: {v.type}")


def number_hint(v: Value, trace: Trace) -> int | float | bool:
    """What a number among the inputs was when the program was captured, where a size tells it."""
    symbols = {s for s, (holder, dim) in trace.symbols.items() if holder is v and dim is None}
    for other in trace.values():
        if isinstance(other.type, TensorType):
            for size in other.type.shape:
                if isinstance(size, torch.SymInt) and str(size) in symbols:
                    return size_hint(size)
    assert isinstance(v.type, ScalarType)
    return v.type.kind(2)


def range_of(x: torch.Tensor) -> Range | None:
    """What `example` must know to make numbers that stand for these: the range of integers, and of floats that are
    all of one sign."""
    if x.numel() == 0 or x.dtype.is_complex:
        return None
    low, high = float(x.min()), float(x.max())
    if not x.is_floating_point():
        return low, high
    return (low, high) if low >= 0 and high < float("inf") else None
