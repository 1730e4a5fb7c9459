"""The gradient of a product of elements, as eager computes it: by division, or, where there is a zero, without.

An element's gradient is the product of all others. Eager divides the whole product by the element unless some element
of the tensor is zero. Both ways give the same for ordinary numbers; NaN and infinity tell them apart, so both stand
here. A gradient that may be differentiated again is the product of the others alone, as in torch.func: a way that is
not taken would have a part in its derivative.
"""

from __future__ import annotations

from tessera.ir.builder import aten
from tessera.ir.equation import ACTIVE, Arg, Value
from tessera.ops.families import cast, is_number, restore, zeros_for


def prod_vjp(ct: Value, y: Value, x: Value, dtype: object) -> tuple:
    def grad() -> Value:
        wide = cast(x, ct.dtype)
        others = aten.reshape(_others(aten.reshape(wide, [-1]), 0), list(x.shape))
        if _again():
            return ct * others
        zeros = aten.sum(aten.eq(wide, 0))  # with two of them eager computes nothing more
        return ct * aten.where(aten.eq(zeros, 0), y / wide, aten.where(aten.eq(zeros, 1), others, 0))

    return (_of_elements(grad, ct, x),)


def prod_dim_vjp(ct: Value, y: Value, x: Value, dim: int, keepdim: Arg, dtype: object) -> tuple:
    def grad() -> Value:
        wide, spread = cast(x, ct.dtype), restore(ct, x, dim, keepdim)
        others = _others(wide, dim)
        if _again():
            return spread * others
        some_zero = aten.any(aten.eq(wide, 0))
        return spread * aten.where(some_zero, others, restore(y, x, dim, keepdim) / wide)

    return (_of_elements(grad, ct, x),)


def _of_elements(grad: object, ct: Value, x: Value) -> object:
    if not x.ndim:
        return ct
    return (lambda: zeros_for(x, ct)) if any(is_number(n, 0) for n in x.shape) else grad


def _again() -> bool:
    return ACTIVE[-1].again  # type: ignore[attr-defined]


def _others(x: Value, dim: int) -> Value:
    """For each element the product of the others along `dim`."""
    behind = [0] * (2 * (x.ndim - 1 - dim % x.ndim))
    before = aten.constant_pad_nd(aten.slice(x, dim, 0, -1), [*behind, 1, 0], 1)
    after = aten.constant_pad_nd(aten.slice(x, dim, 1), [*behind, 0, 1], 1)
    from_end = aten.flip(aten.cumprod(aten.flip(after, [dim]), dim), [dim])
    return aten.cumprod(before, dim) * from_end
