"""Lowerings of matrix products: both operands along the reduced axis, contracted on the matrix units.

`reader.depth` gives the index along which the product sums; the operands are read there and rounded to their own dtype,
which is what the matrix units take, and summed in single precision. What is added (the bias of `linear`, the first
argument of `addmm`) joins before anything is rounded. Products with a vector have no lowering here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.ir.equation import Value
from tessera.tile.from_trace.index import ONE, ZERO, Index, Indices, sizes_of
from tessera.tile.from_trace.lower.pointwise import broadcast
from tessera.tile.from_trace.lower.rule import CONTRACT, Call, Reader, Rule, define
from tessera.tile.from_trace.values import T

OPERANDS = (torch.bfloat16, torch.float16, torch.float32)


def product(names: str, first: int = 0, flipped: bool = False, bias: int | None = None) -> None:
    """Operators that multiply (…, m, k) by (…, k, n), or by (n, k) where the second is `flipped`.

    `first` is the position of the left operand. With `first` of one, what stands before it is scaled by `beta` and
    added to the product scaled by `alpha`; `bias` is the position of something that is simply added.
    """

    def sides(call: Call) -> tuple[Value, Value]:
        a, b = call.args[first], call.args[first + 1]
        assert isinstance(a, Value) and isinstance(b, Value)
        return a, b

    def depth(call: Call) -> Index:
        return sizes_of(sides(call)[0].shape)[-1]

    def refuses(call: Call) -> str:
        a, b = sides(call)
        if min(a.ndim, b.ndim) < 2:
            return "a product with a vector"
        if a.dtype not in OPERANDS or a.dtype is not b.dtype or call.out.dtype is not a.dtype:
            return f"a product of {a.dtype} and {b.dtype}"
        return "a product over one element" if depth(call) == ONE else ""

    def lower(reader: Reader, call: Call, at: Indices) -> T:
        a, b = sides(call)
        k = reader.depth(call.out, at, depth(call))
        lhs = reader.read(a, (*_aligned(a.shape[:-1], at[:-1]), k))
        rhs = reader.read(b, (*_aligned(b.shape[:-2], at[:-2]), *((at[-1], k) if flipped else (k, at[-1]))))
        y = reader.contract(reader.emit.narrow(lhs, a.dtype), reader.emit.narrow(rhs, b.dtype))
        if first:
            y = _scaled(y, call.kwargs.get("alpha", 1))
            beta = call.kwargs.get("beta", 1)
            return y if beta == 0 else y + _scaled(_read(reader, call.args[0], at), beta)
        added = None if bias is None or len(call.args) <= bias else call.args[bias]
        return y if added is None else y + _read(reader, added, at)

    define(names, Rule(CONTRACT, lower, depth=depth, refuses=refuses, sides=sides, flipped=flipped, expensive=True))


def _aligned(shape: Sequence, at: Indices) -> Indices:
    """The index into the outer dimensions of an operand, which PyTorch's broadcasting stretches to the result's."""
    here = at[len(at) - len(shape) :]
    return tuple(ZERO if size == ONE else i for i, size in zip(here, sizes_of(shape), strict=True))


def _read(reader: Reader, x: object, at: Indices) -> T:
    assert isinstance(x, Value)
    return reader.read(x, broadcast(x, at)).to(torch.float32)


def _scaled(x: T, factor: object) -> T:
    return x if factor == 1 else x * float(factor)  # type: ignore[arg-type]


product("linear", flipped=True, bias=2)
product("mm.default bmm.default matmul")
product("addmm.default baddbmm.default", first=1)
