"""Tile values with PyTorch's arithmetic: what the lowering rules compute with.

A `T` is one value of the kernel being made: the dtype it is computed in (half precision is held in single) and the
axes it varies over. An `Emit` makes them, each distinct one once. Without a builder it only looks: it notes every
index expression that the kernel would use, which is what decides how axes are ordered and joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from xdsl.ir import SSAValue

from tessera.ops.uniform import COST as COST_OF_RANDOM
from tessera.tile.dialect.build import KernelBuilder
from tessera.tile.dialect.elements import element_of_dtype
from tessera.tile.dialect.functions import FUNCTIONS
from tessera.tile.dialect.index import Index, name
from tessera.tile.from_trace.index import Unlowerable

Number = bool | int | float
Make = Callable[[KernelBuilder], SSAValue]
HALF = (torch.float16, torch.bfloat16)
NARROW = (*HALF, torch.float8_e4m3fn, torch.float8_e5m2)  # only carried: arithmetic is in 32 bits
CHOICES = ("maximum", "minimum", "fmax", "fmin", "select", "abs", "neg")  # give an argument back, up to its sign


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which arithmetic on this one is done."""
    return torch.float32 if dtype in NARROW else dtype


def held(value: Number, dtype: torch.dtype) -> Number:
    """A number as a tensor of this dtype holds it."""
    return torch.tensor(value, dtype=dtype).item() if dtype in NARROW else value


@dataclass(frozen=True, eq=False)
class T:
    emit: Emit
    dtype: torch.dtype
    axes: frozenset[str]
    ssa: SSAValue | None = None

    # --- arithmetic; a number takes the dtype of the value beside it ---

    def _with(self, fn: str, logical: str, other: T | Number) -> T:
        if self.dtype is torch.bool:
            if not logical:
                raise Unlowerable(f"{fn} of truth values")
            fn = logical
        return self.emit.apply(fn, self, self.like(other))

    def like(self, other: T | Number) -> T:
        return other if isinstance(other, T) else self.emit.constant(other, self.dtype)

    def __add__(self, other: T | Number) -> T:
        return self._with("add", "logical_or", other)

    def __sub__(self, other: T | Number) -> T:
        return self._with("sub", "", other)

    def __mul__(self, other: T | Number) -> T:
        return self._with("mul", "logical_and", other)

    def __truediv__(self, other: T | Number) -> T:
        return self._with("div", "", other)

    def __rsub__(self, other: Number) -> T:
        return self.like(other) - self

    def __rtruediv__(self, other: Number) -> T:
        return self.like(other) / self

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> T:
        return self.emit.apply("neg", self)

    def compare(self, fn: str, other: T | Number) -> T:
        a, b = self, self.like(other)
        if a.dtype is torch.bool:  # order is that of 0 and 1
            a, b = a.to(torch.int32), b.to(torch.int32)
        return self.emit.apply(fn, a, b, dtype=torch.bool)

    def __lt__(self, other: T | Number) -> T:
        return self.compare("lt", other)

    def __le__(self, other: T | Number) -> T:
        return self.compare("le", other)

    def __gt__(self, other: T | Number) -> T:
        return self.compare("gt", other)

    def __ge__(self, other: T | Number) -> T:
        return self.compare("ge", other)

    def eq(self, other: T | Number) -> T:
        return self.compare("eq", other)

    def ne(self, other: T | Number) -> T:
        return self.compare("ne", other)

    # --- truth values ---

    def __and__(self, other: T) -> T:
        return self.emit.apply("logical_and", self.truth(), other.truth())

    def __or__(self, other: T) -> T:
        return self.emit.apply("logical_or", self.truth(), other.truth())

    def __xor__(self, other: T) -> T:
        return self.emit.apply("logical_xor", self.truth(), other.truth())

    def __invert__(self) -> T:
        return self.emit.apply("logical_not", self.truth())

    def truth(self) -> T:
        return self if self.dtype is torch.bool else self.ne(0)

    def where(self, yes: T | Number, no: T | Number) -> T:
        """`yes` where this holds, `no` elsewhere."""
        if not isinstance(yes, T):
            assert isinstance(no, T)
            yes = no.like(yes)
        return self.emit.apply("select", self.truth(), yes, yes.like(no), dtype=yes.dtype)

    # --- the rest ---

    def fn(self, fn: str, *others: T | Number) -> T:
        """An elementwise function by name."""
        return self.emit.apply(fn, self, *map(self.like, others))

    def to(self, dtype: torch.dtype) -> T:
        return self.emit.cast(self, wide(dtype))

    def rounded(self, dtype: torch.dtype) -> T:
        """The nearest value of a dtype of 16 bits or 8, as wide as arithmetic is."""
        return self.emit.rounded(self, dtype)


@dataclass
class Emit:
    builder: KernelBuilder | None = None
    looked: list[Index] = field(default_factory=list)  # every index expression, where there is no builder
    stored: list[Index] = field(default_factory=list)  # those of stores
    costs: float = 0
    gathered: dict[str, T] = field(default_factory=dict)
    buffers: dict[object, SSAValue | None] = field(default_factory=dict)
    _values: dict[tuple, T] = field(default_factory=dict)
    axis_names: frozenset[str] = frozenset()
    in_order: bool = False  # something depends on the order in which the reduced elements are walked
    _loaded: dict[T, T] = field(default_factory=dict)  # as wide as arithmetic is, and as it lay in memory
    _narrow: dict[T, torch.dtype] = field(default_factory=dict)  # values that a narrower dtype has too
    _numbers: dict[T, Number] = field(default_factory=dict)

    def _once(self, key: tuple, dtype: torch.dtype, axes: frozenset[str], make: Make) -> T:
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = T(self, dtype, axes, make(self.builder) if self.builder is not None else None)
        return value

    # --- values ---

    def constant(self, value: Number, dtype: torch.dtype) -> T:
        value, dtype = held(value, dtype), wide(dtype)
        if dtype is torch.bool:
            value = bool(value)
        elif not dtype.is_floating_point:
            bounds = torch.iinfo(dtype)
            if not bounds.min <= value <= bounds.max:
                raise Unlowerable(f"{value} is no {dtype}")
        key = ("constant", repr(value), dtype)
        result = self._once(key, dtype, frozenset(), lambda k: k.constant(value, element_of_dtype(dtype)))
        self._numbers[result] = value
        return result

    def apply(self, fn: str, *args: T, dtype: torch.dtype | None = None) -> T:
        dtype = dtype or (torch.bool if FUNCTIONS[fn].predicate else args[-1].dtype)
        kinds = {a.dtype for a in (args[1:] if fn == "select" else args)}
        assert len(kinds) == 1, f"{fn} of {kinds}"
        key = ("apply", fn, *args)
        if key not in self._values:
            self.costs += FUNCTIONS[fn].cost
        element = element_of_dtype(dtype)
        result = self._once(key, dtype, _union(args), lambda k: k.apply(fn, *(a.ssa for a in args), element=element))  # type: ignore[misc]
        if fn in CHOICES and (narrow := self._narrowest(args[1:] if fn == "select" else args)) is not None:
            self._narrow[result] = narrow
        return result

    def _narrowest(self, args: Sequence[T]) -> torch.dtype | None:
        """The dtype of 16 bits or 8 that has all of these values; numbers count where it has them too."""
        dtypes = {self._narrow.get(a) for a in args if a not in self._numbers}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        numbers = [self._numbers[a] for a in args if a in self._numbers]
        return dtype if dtype is not None and all(torch.tensor(n).to(dtype).item() == n for n in numbers) else None

    def cast(self, x: T, dtype: torch.dtype) -> T:
        if x.dtype is dtype:
            return x
        return self._once(("cast", x, dtype), dtype, x.axes, lambda k: k.cast(x.ssa, element_of_dtype(dtype)))  # type: ignore[arg-type]

    def iota(self, e: Index) -> T:
        """The index itself, as an integer."""
        expr, indices = self._indices(e)
        axes = self._axes(e, indices)
        return self._once(("iota", e), torch.int64, axes, lambda k: k.iota(expr, _ssa(indices)))

    def random(self, seed: T, offset: T) -> T:
        """32 random bits, as an integer."""
        key = ("random", seed, offset)
        if key not in self._values:
            self.costs += COST_OF_RANDOM
        return self._once(key, torch.int64, _union((seed, offset)), lambda k: k.random(seed.ssa, offset.ssa))  # type: ignore[arg-type]

    def gather(self, x: T) -> Index:
        """An integer value as an index."""
        x = x.to(torch.int64)
        for text, known in self.gathered.items():
            if known is x:
                return name(text)
        text = f"_g{len(self.gathered)}"
        self.gathered[text] = x
        return name(text)

    def reduce(self, kind: str, x: T, axes: Sequence[str]) -> T:
        dtype = torch.int64 if kind.startswith("arg") else x.dtype
        self.in_order |= kind.startswith("arg")
        for axis in axes:
            source = x

            def make(k: KernelBuilder, source: T = source, axis: str = axis) -> SSAValue:
                return k.reduce(kind, source.ssa, axis)  # type: ignore[arg-type]

            x = self._once(("reduce", kind, source, axis), dtype, source.axes - {axis}, make)
        return x

    def narrow(self, x: T, dtype: torch.dtype) -> T:
        """A value rounded to its own dtype; what was loaded is that already."""
        loaded = self._loaded.get(x)
        return loaded if loaded is not None and loaded.dtype is dtype else self.cast(x, dtype)

    def rounded(self, x: T, dtype: torch.dtype) -> T:
        if self._narrow.get(x) is dtype:
            return x
        narrow = self.narrow(x, dtype)
        return self._loaded_as(narrow, self.cast(narrow, wide(dtype)))

    def contract(self, lhs: T, rhs: T, axis: str) -> T:
        key = ("contract", lhs, rhs, axis)
        if key not in self._values:
            self.costs += 1
        axes = (lhs.axes | rhs.axes) - {axis}
        return self._once(key, torch.float32, axes, lambda k: k.contract(lhs.ssa, rhs.ssa, axis))  # type: ignore[arg-type]

    def scan(self, kind: str, x: T, axis: str) -> T:
        self.in_order = True
        return self._once(("scan", kind, x, axis), x.dtype, x.axes, lambda k: k.scan(kind, x.ssa, axis))  # type: ignore[arg-type]

    # --- memory ---

    def load(self, buffer: object, dtype: torch.dtype, offset: Index, mask: T | None) -> T:
        expr, indices = self._indices(offset)
        axes = self._axes(offset, indices) | (mask.axes if mask else frozenset())

        def make(k: KernelBuilder) -> SSAValue:
            return k.load(self.buffer(buffer, dtype), expr, _ssa(indices), mask.ssa if mask else None)  # type: ignore[arg-type]

        if self.builder is None:
            self.buffers.setdefault(buffer, None)
        loaded = self._once(("load", buffer, offset, mask), dtype, axes, make)
        return self._loaded_as(loaded, self.cast(loaded, wide(dtype)))

    def _loaded_as(self, loaded: T, x: T) -> T:
        self._loaded.setdefault(x, loaded)
        if loaded.dtype in NARROW:
            self._narrow[x] = loaded.dtype
        return x

    def store(self, buffer: object, dtype: torch.dtype, value: T, offset: Index) -> None:
        expr, indices = self._indices(offset)
        self.stored.append(offset)
        if self.builder is not None:
            x = self.cast(value, dtype)
            self.builder.store(x.ssa, self.buffer(buffer, dtype), expr, _ssa(indices))  # type: ignore[arg-type]

    def buffer(self, key: object, dtype: torch.dtype) -> SSAValue:
        buffer = self.buffers.get(key)
        if buffer is None:
            assert self.builder is not None
            buffer = self.buffers[key] = self.builder.buffer(element_of_dtype(dtype))
        return buffer

    def _indices(self, e: Index) -> tuple[Index, list[T]]:
        """The expression with gathered indices numbered, and their values."""
        self.looked.append(e)
        used = sorted(n for n in e.names() if n in self.gathered)
        if not used:
            return e, []
        renamed = e.substitute({n: name(f"_{k}") for k, n in enumerate(used)})
        return renamed, [self.gathered[n] for n in used]

    def _axes(self, e: Index, indices: list[T]) -> frozenset[str]:
        return (e.names() & self.axis_names) | _union(indices)


def _union(values: Iterable[T]) -> frozenset[str]:
    return frozenset().union(*(v.axes for v in values))


def _ssa(values: list[T]) -> list[SSAValue]:
    return [v.ssa for v in values]  # type: ignore[misc]
