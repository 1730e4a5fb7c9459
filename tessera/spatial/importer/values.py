"""Values of a Trace while it is imported: tensors that are known now, and expressions over homes.

An expression stays one until somebody needs it as a matrix: another operator than arithmetic, or a second reader.
Then a node computes it, and it is a plain map of the new home. So arithmetic fuses into whoever reads it first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tessera.ir.equation import NOWHERE, Source
from tessera.spatial.graph import Apply, Constant, Expression, Graph, Number, Tree, depth, functions, reduces, shift
from tessera.spatial.maps import Home, Map, Shape, whole


@dataclass(frozen=True, eq=False)
class Known:
    """A tensor that does not depend on the inputs. What `varies` between blocks with one program lies in memory and is
    never a part of the program."""

    data: torch.Tensor
    name: str = "constant"
    varies: bool = False


@dataclass(frozen=True, eq=False)
class Lazy:
    """An expression over maps, each of which broadcasts to `shape`; numbers are rounded to `dtype` when it is
    written. What was `narrowed`, cast to a type with fewer bits, is written before another type reads it."""

    shape: Shape
    dtype: torch.dtype
    tree: Tree
    operands: tuple[Map, ...]
    name: str
    source: Source = NOWHERE
    narrowed: bool = False

    @property
    def index(self) -> Map:
        """The map of a value that is one already."""
        assert self.tree == 0
        return self.operands[0]


Item = Known | Lazy
ON_BITS = ("gcd", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift")
DEEP = 24  # functions over each other in one expression; a listing can have more, a reader's patience not
GROWING = {"add", "sub", "mul", "neg", "abs", "bitwise_left_shift"}  # may leave the type of their arguments


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype != torch.bool


def _outgrows(lazy: Lazy) -> bool:
    """Whether an expression may hold what its type does not, since the unit computes in 32 bits or more."""
    narrow = not lazy.dtype.is_floating_point and lazy.dtype.itemsize < 4
    return narrow and not GROWING.isdisjoint(functions(lazy.tree))


def _reach(tree: Tree) -> tuple[float, float]:
    """Between which numbers an expression stays, as far as it says so itself."""
    match tree:
        case Number(value):
            return value, value
        case Apply("minimum" | "maximum" as fn, args):
            lows, highs = zip(*map(_reach, args), strict=True)
            combined = min if fn == "minimum" else max
            return combined(lows), combined(highs)
        case Apply("round" | "trunc" | "floor" | "ceil", (arg,)):
            return _reach(arg)
    return -math.inf, math.inf


def _fits(tree: Tree, dtype: torch.dtype) -> bool:
    """Whether an expression stays within an integer type."""
    low, high = _reach(tree)
    limits = torch.iinfo(dtype)
    return limits.min <= low and high <= limits.max


def fold(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor as a matrix: the last dimension is a row."""
    columns = shape[-1] if shape else 1
    return int(np.prod(shape[:-1], dtype=np.int64)) if len(shape) > 1 else 1, columns


class Values:
    """Makes homes for values."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.constants: dict[tuple, tuple[Home, torch.Tensor]] = {}
        self.at_host: dict[tuple[Map, torch.dtype], str] = {}  # what operators there read, by name
        self.counts: dict[int, Known] = {}
        self.wrapped: dict[tuple[Map, int], Lazy] = {}  # places that count from the end, as those from the beginning

    # --- homes ---

    def constant(self, known: Known) -> Map:
        """The map of a known tensor; what is expanded lies once."""
        data = known.data.detach()
        strides = zip(data.stride(), data.shape, strict=True)
        small = data[tuple(slice(0, 1) if stride == 0 and n > 1 else slice(None) for stride, n in strides)]
        key = (data.data_ptr(), data.dtype, tuple(small.shape), tuple(small.stride()))
        if key not in self.constants:
            home = self.graph.home(known.name, data.dtype, *fold(small.shape))
            self.graph.add(Constant(home, small))
            self.constants[key] = home, data  # the tensor is kept, for its address is the key
        return whole(self.constants[key][0], small.shape).expand(*data.shape)

    def every(self, rows: int) -> Map:
        """The numbers of so many rows."""
        if rows not in self.counts:
            self.counts[rows] = Known(torch.arange(rows)[:, None], f"rows{rows}")
        return self.constant(self.counts[rows])

    def lazy(self, item: Item) -> Lazy:
        if isinstance(item, Lazy):
            return item
        data = item.data
        if data.numel() == 1 and not data.is_complex() and not item.varies:
            return Lazy(tuple(data.shape), data.dtype, Number(data.item()), (), item.name)
        return Lazy(tuple(data.shape), data.dtype, 0, (self.constant(item),), item.name)

    def kind(self, lazy: Lazy) -> str:
        """Whether an expression is computed in floats or in integers; empty for truth values and numbers alone."""
        dtypes = [home.dtype for o in lazy.operands for home in o.homes[:1]]
        if any(d.is_floating_point for d in dtypes):
            return "float"
        return "int" if any(d != torch.bool for d in dtypes) else ""

    def is_plain(self, lazy: Lazy) -> bool:
        return lazy.tree == 0 and all(home.dtype == lazy.dtype for home in lazy.index.homes)

    def plain(self, item: Item) -> Lazy:
        """The value as a map: an expression becomes a node."""
        if isinstance(item, Known):
            return Lazy(tuple(item.data.shape), item.data.dtype, 0, (self.constant(item),), item.name)
        return item if self.is_plain(item) else self.written(item)

    def map(self, item: Item) -> Map:
        """The map of a value, whatever it is."""
        if isinstance(item, Known):
            return self.constant(item)
        return self.plain(item).index.expand(*item.shape)

    def written(self, lazy: Lazy) -> Lazy:
        """A node that computes an expression without reductions, in the order in which its largest operand lies."""
        like = next((order for o in lazy.operands if (order := self.order(o, lazy.shape)) is not None), None)
        if like is None:
            return self.relaid(lazy, list(range(len(lazy.shape))))
        return self.relaid(lazy, like[1], like[0])

    def relaid(self, lazy: Lazy, dims: list[int], like: Home | None = None) -> Lazy:
        """A node that computes an expression and lays it out by dimensions in this order, the last one along rows."""
        rows, columns = fold([lazy.shape[d] for d in dims]) if like is None else (like.rows, like.columns)
        home = self.graph.home(lazy.name, lazy.dtype, rows, columns, lazy.source)
        operands = [o.expand(*lazy.shape).permute(*dims).reshape(rows, columns) for o in lazy.operands]
        self.graph.add(Expression(home, lazy.tree, operands))
        index = whole(home, [lazy.shape[d] for d in dims]).permute(*(dims.index(d) for d in range(len(dims))))
        return Lazy(lazy.shape, lazy.dtype, 0, (index,), lazy.name, lazy.source)

    def order(self, index: Map, shape: Shape) -> tuple[Home, list[int]] | None:
        """The home of which a map holds each element once, and its dimensions in the order in which they lie there."""
        home = index.pieces[0].home if len(index.pieces) == 1 else None
        if index.shape != shape or home is None or home.size != index.size:
            return None
        strides = index.pieces[0].strides
        dims = sorted(range(len(shape)), key=lambda d: -strides[d])
        return (home, dims) if index.permute(*dims) == whole(home, [shape[d] for d in dims]) else None

    def reduced(self, fn: str, lazy: Lazy, dims: list[int], keep: bool, dtype: torch.dtype) -> Lazy:
        """A node that combines an expression along dimensions."""
        assert not reduces(lazy.tree)
        lazy = self.plain(lazy) if _outgrows(lazy) else self.in_type(lazy, dtype)
        left = [d for d in range(len(lazy.shape)) if d not in dims]
        rows = int(np.prod([lazy.shape[d] for d in left], dtype=np.int64))
        columns = int(np.prod([lazy.shape[d] for d in dims], dtype=np.int64))
        operands = [o.expand(*lazy.shape).permute(*left, *dims).reshape(rows, columns) for o in lazy.operands]
        home = self.graph.home(lazy.name, dtype, rows, 1, lazy.source)
        self.graph.add(Expression(home, Apply(fn, (lazy.tree,)), operands))
        shape = [1 if d in dims else n for d, n in enumerate(lazy.shape) if keep or d not in dims]
        return Lazy(tuple(shape), dtype, 0, (whole(home, shape),), home.name, lazy.source)

    # --- expressions ---

    def apply(self, fn: str, items: Sequence[Item], dtype: torch.dtype, name: str, source: Source) -> Lazy:
        """A function of elements; arguments of another kind of number are written first."""
        lazies = [self.in_type(x, dtype) for x in map(self.lazy, items)]
        lazies = [self.plain(x) if _outgrows(x) or depth(x.tree) >= DEEP else x for x in lazies]
        if _is_integer(dtype) and (fn in ON_BITS or "int" in map(self.kind, lazies)):
            # Integers stay exact: what was asked of floats is written as the truth value that it is.
            lazies = [self.plain(x) if self.kind(x) == "float" and not x.dtype.is_floating_point else x for x in lazies]
        if {"float", "int"} <= set(map(self.kind, lazies)):
            lazies = [self.as_float(x, dtype) if self.kind(x) == "int" else x for x in lazies]
        shape = tuple(torch.broadcast_shapes(*(x.shape for x in lazies)))
        operands: list[Map] = []
        trees: list[Tree] = []
        for x in lazies:
            places = [self.place(o, len(shape), operands) for o in x.operands]
            trees.append(shift(x.tree, places))
        return Lazy(shape, dtype, Apply(fn, tuple(trees)), tuple(operands), name, source)

    def as_float(self, lazy: Lazy, dtype: torch.dtype) -> Lazy:
        """Integers or truth values as a home that arithmetic of floats reads."""
        wanted = lazy.dtype if lazy.dtype == torch.bool else dtype if dtype.is_floating_point else torch.float32
        return self.plain(replace(lazy, dtype=wanted))

    def in_type(self, lazy: Lazy, dtype: torch.dtype) -> Lazy:
        """What was narrowed, or holds more than its type does, written where another type reads it: only then is it
        rounded, or wraps."""
        return self.plain(lazy) if (lazy.narrowed or _outgrows(lazy)) and lazy.dtype != dtype else lazy

    def cast(self, item: Item, dtype: torch.dtype) -> Lazy:
        """Another type. Floats stay in the expression, which is rounded when it is written; but it is computed in 64
        bits only where something of 64 bits is read."""
        lazy = self.lazy(item)
        if lazy.dtype == dtype:
            return lazy
        if isinstance(lazy.tree, Number):
            value = torch.tensor(lazy.tree.value).to(dtype).item()
            return Lazy(lazy.shape, dtype, Number(value), (), lazy.name, lazy.source)
        lazy = self.in_type(lazy, dtype)
        other = replace(lazy, dtype=dtype)
        if lazy.dtype.is_floating_point and dtype.is_floating_point:
            if dtype == torch.float64:
                return self.plain(other)
            return replace(other, narrowed=dtype.itemsize <= lazy.dtype.itemsize)
        if lazy.dtype.is_floating_point and dtype != torch.bool:
            # A unit holds what it writes within its type; PyTorch takes the low bits of a number of 32.
            wide = dtype if dtype.itemsize > 2 or _fits(lazy.tree, dtype) else torch.int32
            cut = self.plain(self.apply("trunc", [lazy], wide, lazy.name, lazy.source))
            return self.cast(cut, dtype)
        if dtype == torch.bool:
            zero = Known(torch.zeros((), dtype=lazy.dtype))
            return self.plain(self.apply("ne", [lazy, zero], dtype, lazy.name, lazy.source))
        return self.plain(other)

    def place(self, index: Map, ndim: int, operands: list[Map]) -> int:
        """The number of a map among operands, where it may stand already."""
        index = index.reshape(*(1,) * (ndim - index.ndim), *index.shape)
        if index not in operands:
            operands.append(index)
        return operands.index(index)
