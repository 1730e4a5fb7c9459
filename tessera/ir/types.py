"""Types of the values in a Trace.

A tensor's type is its dtype, shape, strides, device and layout; sizes are ints or symbolic (`torch.SymInt`).
A scalar's type is the Python kind of a number known only when the program runs.
`key()` is a hashable form in which equal symbolic sizes are equal; nothing here ever adds a guard.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tessera.ir.placement import Placement, Size
from tessera.torch_internals import shapes
from tessera.torch_internals.shapes import symbol_values, unreplaced_expression

UNKNOWN = 4096  # what a size that nobody knows is taken for

Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def known(size: Size) -> Size:
    """A symbolic size that can only be one number as that number: a guard fixed its symbols, or says that it is one,
    as broadcasting asks of `(n + 2) // 3`."""
    if isinstance(size, int):
        return size
    number = size.node.maybe_as_int()
    if number is None and size_hint(size) == 1 and settled(size == 1):
        return 1
    return size if number is None else number


def settled(truth: bool | torch.SymBool) -> bool | None:
    """What guards say of a comparison of sizes; None where they leave it open."""
    if isinstance(truth, bool):
        return truth
    if shapes.statically_known_true(truth):
        return True
    return False if shapes.statically_known_true(torch.sym_not(truth)) else None


def size_key(size: object) -> object:
    """A hashable stand-in for a size: its number, or the text of the symbolic expression."""
    if isinstance(size, torch.SymInt):
        size = known(size)
    return size if isinstance(size, int) else number_text(size)


def number_text(number: object) -> str:
    """The text of a symbolic number. SymPy prints slowly, and every comparison of symbolic types asks for it."""
    expression = getattr(number.node, "expr", None) if isinstance(number, SYMBOLIC) else None
    return str(number) if expression is None else _text(expression)


@functools.lru_cache(maxsize=1 << 14)
def _text(expression: object) -> str:
    return str(expression)


def row_major(shape: Sequence[Size], stride: Sequence[Size]) -> bool:
    step: object = 1
    for size, own in zip(reversed(shape), reversed(stride), strict=True):
        if size_key(own) != size_key(step) and size_key(size) != 1:
            return False
        step = step * size  # type: ignore[operator]
    return True


def contiguous_strides(shape: Sequence[Size], order: Sequence[int] | None = None) -> tuple[Size, ...]:
    """Strides without gaps, with the dimensions in this order in memory; row by row where none is given."""
    strides: list[Size] = [1] * len(shape)
    step: Size = 1
    for d in reversed(range(len(shape)) if order is None else order):
        strides[d] = step
        step = step * shape[d]
    return tuple(strides)


def overlaps_itself(shape: Sequence[Size], stride: Sequence[Size]) -> bool:
    """Several elements at one address, as in an expanded tensor or in windows of one; or so for all that is known."""
    known = []
    for size, step in zip(shape, stride, strict=False):
        if size_key(size) == 1:
            continue
        if type(size) is not int or type(step) is not int:
            return any(size_key(s) == 0 for s in stride) or not row_major(shape, stride)
        known.append((step, size))
    extent = 1
    for step, size in sorted(known):
        if step < extent:
            return True
        extent = step * (size - 1) + extent
    return False


def is_dense(shape: Sequence[Size], stride: Sequence[Size]) -> bool:
    """Each element lies in memory once, with no gaps, for the sizes of now."""
    extent = 1
    for step, size in sorted(zip(map(size_hint, stride), map(size_hint, shape), strict=True)):
        if size != 1 and step != extent:
            return False
        extent *= size
    return True


@dataclass(frozen=True, eq=False, slots=True)
class TensorType:
    dtype: torch.dtype
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    device: torch.device
    layout: torch.layout = torch.strided
    offset: Size = 0
    bits: tuple[bool, bool] = (False, False)  # lazy conjugate, lazy negative
    placement: Placement | None = None  # where it lies on a mesh; `shape` is that of one rank
    _key: tuple | None = field(default=None, init=False, repr=False)  # `key()`, once asked for
    _asked: tuple[Size, int] | None = field(default=None, init=False, repr=False)  # a symbol, how much was known then

    def key(self) -> tuple:
        if self._key is not None and (self._asked is None or shapes.learned(self._asked[0]) == self._asked[1]):
            return self._key
        shape, stride = tuple(map(size_key, self.shape)), tuple(map(size_key, self.stride))
        key = (self.dtype, shape, stride, self.device, self.layout, self.bits)
        symbols = [size for size in (*self.shape, *self.stride) if type(size) is not int]
        count = shapes.learned(symbols[0]) if symbols else None
        # That a size which is 1 is always 1 may follow from a condition, and those are not counted.
        if not symbols or (count is not None and 1 not in map(size_hint, symbols)):
            object.__setattr__(self, "_key", key)
            object.__setattr__(self, "_asked", None if count is None else (symbols[0], count))
        return key

    def lies_like(self, other: TensorType) -> bool:
        """The same strides, as far as is known now."""
        return [*map(size_key, self.stride)] == [*map(size_key, other.stride)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorType) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def is_differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def is_symbolic(self) -> bool:
        for size in self.shape:  # asked for every value of every region, where a generator takes twice as long
            if type(size) is not int:
                return True
        for size in self.stride:  # noqa: SIM110
            if type(size) is not int:
                return True
        return False

    @property
    def is_row_major(self) -> bool:
        """Each stride is the product of the sizes after it."""
        return row_major(self.shape, self.stride)

    @property
    def is_dense(self) -> bool:
        """Every element once and no gaps, in any order of dimensions; symbolic sizes in row-major order only."""
        if self.is_symbolic:
            return self.is_row_major
        extent = 1
        for stride, size in sorted((d, n) for d, n in zip(self.stride, self.shape, strict=True) if n != 1):
            if stride != extent:
                return False
            extent *= size
        return True

    def numel(self, unknown: int = UNKNOWN) -> int:
        """Number of elements; a symbolic size counts as its hint, or as `unknown` where it has none."""
        count = 1
        for size in self.shape:
            count *= size if isinstance(size, int) else size_hint(size, unknown)
        return count

    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def placed(self, placement: Placement | None) -> TensorType:
        """The same type with a place on a mesh; `key` does not count it, since one rank's program computes the same."""
        placed = TensorType(
            self.dtype, self.shape, self.stride, self.device, self.layout, self.offset, self.bits, placement
        )
        object.__setattr__(placed, "_key", self._key)
        return placed

    def __str__(self) -> str:
        here = f"{dtype_name(self.dtype)}[{', '.join(map(str, self.shape))}]"
        return here if self.placement is None else f"{here}  {self.placement}"


@dataclass(frozen=True, slots=True)
class ScalarType:
    kind: type  # int, float, bool

    def key(self) -> tuple:
        return ("scalar", self.kind)

    def __str__(self) -> str:
        return self.kind.__name__


@dataclass(frozen=True, slots=True)
class OpaqueType:
    """A value Tessera only passes on: a generator, a custom object."""

    name: str

    def key(self) -> tuple:
        return ("opaque", self.name)

    def __str__(self) -> str:
        return self.name


Type = TensorType | ScalarType | OpaqueType

_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def size_hint(size: Size, unknown: int = UNKNOWN) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return unknown if hint is None else int(hint)


def symbol_hints(size: Size) -> dict[str, int]:
    """What the symbols in a size stood for when it was captured."""
    if isinstance(size, int):
        return {}
    values = symbol_values(size.node.shape_env)
    return {s.name: int(values.get(s, UNKNOWN)) for s in size.node.expr.free_symbols}


def symbol_of(number: Symbolic) -> str:
    """The symbol that a number is; empty where it is a formula. One known only at run time stays a symbol when the
    program finds out what it must be: somebody has to check that it is. A truth value asks whether its symbol is 1."""
    expr, before = number.node.expr, unreplaced_expression(number)
    if not expr.is_symbol and before.is_symbol and str(before).startswith("u"):
        expr = before
    if isinstance(number, torch.SymBool) and len(expr.free_symbols) == 1:
        expr = next(iter(expr.free_symbols))
    return str(expr) if expr.is_symbol else ""


def type_of(x: object) -> Type:
    """The type of a tensor (real or fake) or of a symbolic number."""
    if isinstance(x, torch.Tensor):
        strided = x.layout is torch.strided
        return TensorType(
            x.dtype,
            tuple(map(known, x.shape)),
            tuple(map(known, x.stride())) if strided else (),
            x.device,
            x.layout,
            x.storage_offset() if strided else 0,
            (x.is_conj(), x.is_neg()) if strided else (False, False),
        )
    if isinstance(x, (torch.SymInt, int)) and not isinstance(x, bool):
        return ScalarType(int)
    if isinstance(x, (torch.SymFloat, float)):
        return ScalarType(float)
    if isinstance(x, (torch.SymBool, bool)):
        return ScalarType(bool)
    return OpaqueType(type(x).__name__)
