"""Products and exchanges in pieces, as equations whose types are known: nothing is run to learn them.

In: values of one rank's program. Out: equations at the end of a builder. Everything they give is row-major.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from tessera.ir.builder import Builder
from tessera.ir.dist import On
from tessera.ir.equation import Equation, Operator, Value
from tessera.ir.schema import normalise
from tessera.ir.types import TensorType, contiguous_strides
from tessera.torch_internals.operators import OpOverload

aten = torch.ops.aten
PRODUCTS = {"linear": 0, "mm": 0, "addmm": 1, "matmul": 0}  # which argument has the rows


def rows_of(eqn: Equation) -> Value | None:
    """The operand of a product whose rows may be taken a few at a time; None where it is no such product."""
    at = PRODUCTS.get(eqn.opname)
    if at is None:
        return None
    x, weight = eqn.args[at], eqn.args[at + 1]
    if not isinstance(x, Value) or not isinstance(weight, Value) or weight.ndim != 2 or x.ndim < 2 or x is weight:
        return None
    added = eqn.args[0] if eqn.opname == "addmm" else None
    return None if isinstance(added, Value) and added.ndim > 1 else x


class Pieces:
    """Writes equations for pieces along one axis of a mesh."""

    def __init__(self, builder: Builder, dist: On, axis: str) -> None:
        self.builder, self.dist, self.axis = builder, dist, axis
        self.ranks = dist.mesh.size(axis)

    def emit(self, op: Operator, args: tuple, like: Value, shape: Sequence[int], hint: str = "") -> Value:
        kwargs: dict = {}
        if isinstance(op, OpOverload):
            args, kwargs = normalise(op, args, kwargs)
        type_ = TensorType(like.dtype, tuple(shape), contiguous_strides(shape), like.tensor.device)
        return self.builder.record(op, args, kwargs, type_, hint)  # type: ignore[return-value]

    def product(self, eqn: Equation, rows: Value) -> Value:
        """A product of other rows."""
        at = PRODUCTS[eqn.opname]
        args = (*eqn.args[:at], rows, *eqn.args[at + 1 :])
        shape = (*rows.shape[:-1], eqn.out.shape[-1])
        type_ = TensorType(eqn.out.dtype, shape, contiguous_strides(shape), eqn.out.tensor.device)
        out = self.builder.value(eqn.out.name, type_)
        self.builder.equations.append(eqn.with_(args=args, outputs=(out,)))
        return out

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        if list(x.shape) == list(shape):
            return x
        if x.tensor.is_row_major:
            return self.emit(aten.reshape.default, (x, list(shape)), x, shape)
        return self.builder.call("reshape", x, list(shape))  # type: ignore[return-value]

    def add(self, a: Value, b: Value) -> Value:
        return self.emit(aten.add.Tensor, (a, b), a, _sizes(a), "sum")

    def permute(self, x: Value, by: int) -> Value:
        return self.emit(self.dist.permute, (x, self.axis, by), x, _sizes(x), x.name)

    def slice(self, x: Value, dim: int, by: int) -> Value:
        """The chunk of the rank that stands `by` places behind this one."""
        sizes = _sizes(x)
        sizes[dim] //= self.ranks
        return self.emit(self.dist.slice, (x, dim, self.axis, *((by,) if by else ())), x, sizes, x.name)

    def in_order(self, pieces: Sequence[Value], dim: int) -> Value:
        """Pieces of the ranks that stand 0, 1, … places before this one, joined in the order of ranks."""
        sizes = _sizes(pieces[0])
        sizes[dim] *= self.ranks
        return self.emit(self.dist.in_order, (list(pieces), dim, self.axis), pieces[0], sizes)

    # --- rows of a matrix that was made of several dimensions ---

    def as_matrix(self, x: Value) -> Value:
        *rows, columns = _sizes(x)
        return self.reshape(x, [prod(rows), columns])

    def rows_in_order(self, pieces: Sequence[Value], blocks: int) -> Value:
        """Matrices joined by rows, of which each has so many blocks: the ranks' rows of a block lie side by side."""
        if blocks == 1:
            return self.in_order(pieces, 0)
        rows, columns = _sizes(pieces[0])
        whole = self.in_order([self.reshape(p, [blocks, rows // blocks, columns]) for p in pieces], 1)
        return self.reshape(whole, [rows * self.ranks, columns])

    def slice_rows(self, x: Value, blocks: int, by: int) -> Value:
        """A rank's rows of each block of a matrix."""
        if blocks == 1:
            return self.slice(x, 0, by)
        rows, columns = _sizes(x)
        part = self.slice(self.reshape(x, [blocks, rows // blocks, columns]), 1, by)
        return self.reshape(part, [rows // self.ranks, columns])


def _sizes(x: Value) -> list[int]:
    return [int(n) for n in x.shape]


def blocks_before(x: Value, dim: int) -> int:
    """How many blocks of rows stand before a dimension."""
    return prod(_sizes(x)[:dim])
