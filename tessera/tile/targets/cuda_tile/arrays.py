"""How memory is handed to a cuTile kernel: every way in which a buffer is reached is one array parameter.

A load or store whose offset is a sum of strides times axes is an array over those axes, so that cuTile may move whole
tiles (with the tensor memory accelerator where it can) and checks bounds itself. Everything else (gathers, masks,
divisions in the offset, atomic addition) reaches its buffer as flat memory, by element offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import IntegerType
from xdsl.ir import Attribute

from tessera.tile.dialect.index import Index
from tessera.tile.dialect.ops import KernelOp, LoadOp, StoreOp
from tessera.tile.dialect.types import BufferType, axes_of

ALIGNMENT = 16  # bytes: what the tensor memory accelerator and wide loads ask for


@dataclass(frozen=True)
class Array:
    """A buffer seen over some axes, the one of stride 1 last; flat memory where there are none."""

    name: str
    buffer: int
    element: Attribute
    axes: tuple[str, ...] = ()
    strides: tuple[Index, ...] = ()
    offset: Index = Index(())

    @property
    def flat(self) -> bool:
        return not self.axes

    @property
    def itemsize(self) -> int:
        width = self.element.width.data if isinstance(self.element, IntegerType) else self.element.bitwidth  # type: ignore[attr-defined]
        return max(width // 8, 1)


@dataclass(frozen=True)
class Arrays:
    """The array parameters of a kernel, in order, and which one each load and store uses."""

    all: tuple[Array, ...]
    of: Mapping[LoadOp | StoreOp, Array]

    def shares(self, array: Array) -> bool:
        """Whether another parameter reaches the same buffer."""
        return sum(a.buffer == array.buffer for a in self.all) > 1


def arrays(kernel: KernelOp) -> Arrays:
    by_layout: dict[tuple, Array] = {}
    of: dict[LoadOp | StoreOp, Array] = {}
    counts: dict[int, int] = {}
    for op in kernel.block.ops:
        if not isinstance(op, (LoadOp, StoreOp)):
            continue
        buffer = kernel.buffers.index(op.buffer)
        axes, strides, offset = strided(kernel, op) or ((), (), Index(()))
        key = (buffer, axes, strides, offset)
        if key not in by_layout:
            serial = counts[buffer] = counts.get(buffer, -1) + 1
            name = f"x{buffer}" if serial == 0 else f"x{buffer}_{serial}"
            assert isinstance(op.buffer.type, BufferType)
            by_layout[key] = Array(name, buffer, op.buffer.type.element, axes, strides, offset)
        of[op] = by_layout[key]
    return Arrays(tuple(by_layout.values()), of)


def strided(kernel: KernelOp, op: LoadOp | StoreOp) -> tuple[tuple[str, ...], tuple[Index, ...], Index] | None:
    """Axes, strides and offset of an access that is an array over its axes."""
    axes = [a for a in kernel.axis_names() if a in op.at.expr.names()]
    adds = isinstance(op, StoreOp) and op.mode.data == "add"
    if op.indices or op.mask is not None or adds or not axes:
        return None
    if isinstance(op, StoreOp) and not set(axes_of(op.value)) <= set(axes):
        return None
    strides = {a: op.at.expr.stride(a) for a in axes}
    known = set(kernel.axis_names())
    if not all(_positive(s) and not s.names() & known for s in strides.values() if s is not None):
        return None
    if None in strides.values():
        return None
    offset = op.at.expr.substitute({a: 0 for a in axes})
    order = sorted(axes, key=lambda a: _rank(strides[a]))  # type: ignore[arg-type]
    return tuple(order), tuple(strides[a] for a in order), offset  # type: ignore[misc]


def _positive(stride: Index) -> bool:
    return bool(stride.terms) and all(c > 0 for _, c in stride.terms)


def _rank(stride: Index) -> tuple[int, int]:
    """Large strides first: more symbols, then larger numbers; a stride of 1 comes last."""
    symbols = max(len(product) for product, _ in stride.terms)
    return -symbols, -max(c for _, c in stride.terms)


@dataclass(frozen=True)
class Variant:
    """What a binary may assume of every array: aligned addresses and strides, sizes beyond 32 bits."""

    aligned: bool
    wide: bool = False


@dataclass(frozen=True)
class Placed:
    """An array parameter at launch."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def place(array: Array, address: int, sizes: Mapping[str, int], symbols: Mapping[str, int]) -> Placed:
    value = symbols.__getitem__
    if array.flat:
        return Placed(address, (2**31 - 1,), (1,))
    start = address + array.offset.evaluate(value, int) * array.itemsize
    strides = tuple(s.evaluate(value, int) for s in array.strides)
    return Placed(start, tuple(sizes[a] for a in array.axes), strides)


def variant(parameters: Sequence[Array], placed: Sequence[Placed]) -> Variant:
    """The most that can be assumed of these arrays."""
    aligned = all(
        p.address % ALIGNMENT == 0
        and all(
            n * a.itemsize % ALIGNMENT == 0 for n, s in zip(p.strides, a.strides, strict=False) if s.constant is None
        )
        for a, p in zip(parameters, placed, strict=True)
    )
    reach = (sum((n - 1) * s for n, s in zip(p.shape, p.strides, strict=True)) for p in placed)
    return Variant(aligned, wide=any(r >= 2**31 for r in reach))
