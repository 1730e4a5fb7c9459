"""Lowerings of reductions and scans: the argument along the reduced axis, combined.

`reader.along` gives the index into the argument at which the reduced dimensions run over the kernel's reduced axis;
`reader.combine` reduces what was read there. Sums of half precision are taken in single, of integers in 64 bits.
Variances take two passes: the mean first, then the squares of what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tessera.ir.equation import Value
from tessera.tile.from_trace.index import ZERO, Indices, Unlowerable, product
from tessera.tile.from_trace.lower.rule import REDUCE, SCAN, Call, Reader, Rule, define, dims_of, wrap
from tessera.tile.from_trace.lower.view import shape_of
from tessera.tile.from_trace.values import T


def _dims(position: int | None) -> Callable[[Call], list[int]]:
    def dims(call: Call) -> list[int]:
        dim = None if position is None or len(call.args) <= position else call.args[position]
        return dims_of(dim, call.first.ndim)

    return dims


def _keeps(call: Call) -> bool:
    return call.first.ndim == call.out.ndim and call.first.ndim > 0


def source_index(call: Call, dims: list[int], at: Indices) -> Indices:
    """An index into the argument from one into the result; the reduced entries are filled in by `along`."""
    if _keeps(call):
        return at
    rest = list(at)
    return tuple(ZERO if d in dims else rest.pop(0) for d in range(call.first.ndim))


class Rows:
    """A reduction's argument along the reduced axis."""

    def __init__(self, reader: Reader, call: Call, at: Indices, dims: list[int]) -> None:
        self.call, self.dims = call, dims
        self.reader, self.at = reader.along(call.first, dims, source_index(call, dims, at))

    def read(self, dtype: torch.dtype) -> T:
        return self.reader.read(self.call.first, self.at).to(dtype)

    def combine(self, kind: str, x: T) -> T:
        return self.reader.combine(kind, x, self.call.first, self.dims)

    def count(self, like: T, less: float = 0) -> T:
        """How many elements are combined, less a number."""
        many = product([shape_of(self.call.first)[d] for d in self.dims])
        if many.constant is not None:
            return like.like(float(many.constant - less))
        n = self.reader.emit.iota(many).to(like.dtype)
        return n - float(less) if less else n


def reduction(names: str, formula: Callable[[Rows, Call], T], dims: int | None = 1, over_rows: bool = False) -> None:
    find = _dims(dims)

    def lower(reader: Reader, call: Call, at: Indices) -> T:
        return formula(Rows(reader, call, at, find(call)), call).to(call.out.dtype)

    define(names, Rule(REDUCE, lower, dims=find, over_rows=over_rows, expensive=True))


_LOGICAL = {"max": "any", "min": "all", "prod": "all"}  # of truth values


def _plain(kind: str) -> Callable[[Rows, Call], T]:
    def formula(rows: Rows, call: Call) -> T:
        x = rows.read(call.out.dtype)
        return rows.combine(_LOGICAL[kind] if x.dtype is torch.bool else kind, x)

    return formula


def _mean(rows: Rows, call: Call) -> T:
    total = rows.combine("sum", rows.read(call.out.dtype))
    return total / rows.count(total)


def _position(kind: str) -> Callable[[Rows, Call], T]:
    return lambda rows, call: rows.combine(kind, rows.read(_ordered(call.first.dtype)))


def _ordered(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype is torch.bool else dtype


for _form in ("default", "dim_IntList"):
    reduction(f"sum.{_form}", _plain("sum"), over_rows=True)
reduction("mean", _mean, over_rows=True)  # type: ignore[arg-type]
reduction("amax", _plain("max"))
reduction("amin", _plain("min"))
reduction("max.default", _plain("max"), None)
reduction("min.default", _plain("min"), None)
reduction("prod.default", _plain("prod"), None)
reduction("prod.dim_int", _plain("prod"))
for _name in ("any", "all"):
    reduction(
        f"{_name}.default {_name}.dim {_name}.dims",
        lambda rows, call, kind=_name: rows.combine(kind, rows.read(call.first.dtype).truth()),
    )
reduction("argmax", _position("argmax"))
reduction("argmin", _position("argmin"))


def _extreme_and_place(kind: str) -> Callable[[Rows, Call], T]:
    def formula(rows: Rows, call: Call) -> T:
        x = rows.read(_ordered(call.first.dtype))
        return rows.combine(kind if call.number == 0 else f"arg{kind}", x)

    return formula


reduction("max.dim", _extreme_and_place("max"))
reduction("min.dim", _extreme_and_place("min"))

# --- spread ---------------------------------------------------------------------------------------------


def _moments(rows: Rows, call: Call, correction: object, root: bool) -> tuple[T, T]:
    if correction is not None and not isinstance(correction, (int, float)):
        raise Unlowerable("a correction known only at run time")
    x = rows.read(call.out.dtype)
    mean = rows.combine("sum", x)
    mean = mean / rows.count(mean)
    left = x - mean
    total = rows.combine("sum", left * left)
    if root:
        # A mean of equal numbers may be a rounding away from them, and the derivative of a root divides by the root.
        top = rows.combine("max", x)
        total = top.compare("eq", rows.combine("min", x)).where(top - top, total)
    return total / rows.count(total, 1.0 if correction is None else correction).fn("maximum", 0), mean


def _spread(root: bool, pair: bool) -> Callable[[Rows, Call], T]:
    def formula(rows: Rows, call: Call) -> T:
        variance, mean = _moments(rows, call, call.kwargs.get("correction"), root)
        if pair and call.number == 1:
            return mean
        return variance.fn("sqrt") if root else variance

    return formula


reduction("var.correction", _spread(False, False))
reduction("std.correction", _spread(True, False))
reduction("var_mean.correction", _spread(False, True))
reduction("std_mean.correction", _spread(True, True))


def _logsumexp(rows: Rows, call: Call) -> T:
    x = rows.read(call.out.dtype)
    top = rows.combine("max", x)
    top = top.fn("isinf").where(0.0, top)
    return rows.combine("sum", (x - top).fn("exp")).fn("log") + top


def _vector_norm(rows: Rows, call: Call) -> T:
    order, x = call.args[1], rows.read(call.out.dtype)
    if order == 2:
        return rows.combine("sum", x * x).fn("sqrt")
    if order == 1:
        return rows.combine("sum", x.fn("abs"))
    if order == math.inf:
        return rows.combine("max", x.fn("abs"))
    raise Unlowerable(f"a norm of order {order}")


reduction("logsumexp", _logsumexp)
reduction("linalg_vector_norm", _vector_norm, 2)

# --- scans ------------------------------------------------------------------------------------------------


def _scan(kind: str) -> Rule:
    def dims(call: Call) -> list[int]:
        return [wrap(call.args[1], call.first.ndim)]  # type: ignore[arg-type]

    def lower(reader: Reader, call: Call, at: Indices) -> T:
        source: Value = call.first
        dim = dims(call)[0]
        inner, index = reader.along(source, [dim], at)  # all of the row is read, whatever part of the result is
        if at[dim] != index[dim]:
            raise Unlowerable("a running sum read elsewhere than where it runs")
        return reader.running(kind, inner.read(source, index).to(call.out.dtype), source, dim)

    def refuses(call: Call) -> str:
        return "" if call.first.ndim else "a single number has nothing to run along"

    return Rule(SCAN, lower, dims=dims, refuses=refuses, expensive=True)


define("cumsum", _scan("sum"))
define("cumprod", _scan("prod"))
