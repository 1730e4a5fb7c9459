"""Gradients of products of elements, as eager computes them: by division, or, where there is a zero, without.

An element's gradient is the product of all others. Eager divides the whole product by the element unless some element
of the tensor is zero. Both ways give the same for ordinary numbers; NaN and infinity tell them apart, so both stand
here. A gradient that may be differentiated again is the product of the others alone, as in torch.func.grad: a way that
is not taken would have a part in its derivative. So it is with running products (cumprod).
"""

from __future__ import annotations

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Value
from tessera.ops.families import cast, differentiated_again, is_number, restore, zeros_for
from tessera.ops.formula import finish, pytorch_vjp


def prod_vjp(ct: Value, y: Value, x: Value, dtype: object) -> tuple:
    def grad() -> Value:
        wide = cast(x, ct.dtype)
        others = aten.reshape(_others(aten.reshape(wide, [-1]), 0), list(x.shape))
        if differentiated_again():
            return ct * others
        zeros = aten.sum(aten.eq(wide, 0))  # with two of them eager computes nothing more
        return ct * aten.where(aten.eq(zeros, 0), y / wide, aten.where(aten.eq(zeros, 1), others, 0))

    return (_of_elements(grad, ct, x),)


def prod_dim_vjp(ct: Value, y: Value, x: Value, dim: int, keepdim: Arg, dtype: object) -> tuple:
    def grad() -> Value:
        wide, expanded = cast(x, ct.dtype), restore(ct, x, dim, keepdim)
        others = _others(wide, dim)
        if differentiated_again():
            return expanded * others
        some_zero = aten.any(aten.eq(wide, 0))
        return expanded * aten.where(some_zero, others, restore(y, x, dim, keepdim) / wide)

    return (_of_elements(grad, ct, x),)


def cumprod_vjp(ct: Value, y: Value, x: Value, dim: int, dtype: torch.dtype | None) -> tuple:
    """PyTorch's own formula looks at data, and is another on fake tensors, which have none (before 2.13)."""

    def as_pytorch() -> object:
        rule = pytorch_vjp([True], torch.ops.aten.cumprod.default, x, dim, dtype=dtype)
        next(rule)
        return finish(rule, ct)[0]

    def grad() -> Value:
        wide = cast(x, ct.dtype)
        is_zero = aten.eq(wide, 0)
        zeros = aten.cumsum(is_zero, dim)  # up to here
        ahead, between = aten.eq(zeros, 0), aten.eq(zeros, 1)  # of the first one; from it to the second one
        first = aten.logical_and(between, is_zero)
        weighted = aten.where(ahead, y * ct, 0)
        divided = aten.flip(aten.cumsum(aten.flip(weighted, [dim]), dim), [dim]) / wide
        product = aten.slice(aten.cumprod(aten.where(ahead, wide, 1), dim), dim, -1)
        behind = aten.cumprod(aten.where(aten.ne(between, first), wide, 1), dim)
        others = product * aten.sum(behind * aten.where(between, ct, 0), [dim], True)
        return aten.where(ahead, divided, aten.where(first, others, 0))

    if not x.ndim or is_number(x.shape[dim], 1):
        return (ct,)
    return (as_pytorch if differentiated_again() or x.dtype.is_complex else grad,)


def _of_elements(grad: object, ct: Value, x: Value) -> object:
    if not x.ndim:
        return ct
    return (lambda: zeros_for(x, ct)) if any(is_number(n, 0) for n in x.shape) else grad


def _others(x: Value, dim: int) -> Value:
    """For each element the product of the others along `dim`."""
    behind = [0] * (2 * (x.ndim - 1 - dim % x.ndim))
    before = aten.constant_pad_nd(aten.slice(x, dim, 0, -1), [*behind, 1, 0], 1)
    after = aten.constant_pad_nd(aten.slice(x, dim, 1), [*behind, 0, 1], 1)
    from_end = aten.flip(aten.cumprod(aten.flip(after, [dim]), dim), [dim])
    return aten.cumprod(before, dim) * from_end
