"""Unsigned integers of 16, 32 and 64 bits, which PyTorch stores and hardly computes with.

The first two fit int64. The last is looked at as int64: sums and products wrap alike; what depends on order flips the
sign bit first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from tessera.frontends.onnx.elements import WIDE_UNSIGNED

_SIGN = -(2**63)


def wide(fn: Callable) -> Callable:
    """`fn` over int64 in place of wide unsigned integers; 64 bits wrap."""
    return _through(fn, ordered=False)


def wide_ordered(fn: Callable) -> Callable:
    """The same for a function that compares its inputs, and gives booleans or some of its inputs' elements."""
    return _through(fn, ordered=True)


def _through(fn: Callable, ordered: bool) -> Callable:
    @functools.wraps(fn)
    def run(*args: object, **kwargs: object) -> object:
        dtypes = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.dtype in WIDE_UNSIGNED]
        if not dtypes:
            return fn(*args, **kwargs)
        out = fn(*(_in(a, ordered) for a in args), **kwargs)
        return (
            tuple(_out(x, dtypes[0], ordered) for x in out) if isinstance(out, tuple) else _out(out, dtypes[0], ordered)
        )

    return run


def _in(a: object, ordered: bool) -> object:
    if not isinstance(a, torch.Tensor) or a.dtype not in WIDE_UNSIGNED:
        return a
    return as_int64(a) ^ _SIGN if ordered and a.dtype == torch.uint64 else as_int64(a)


def _out(x: torch.Tensor, dtype: torch.dtype, ordered: bool) -> torch.Tensor:
    if x.dtype != torch.int64:
        return x
    if dtype != torch.uint64:
        return x.to(dtype)
    return (x ^ _SIGN if ordered else x).view(torch.uint64)


def as_int64(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int64) if x.dtype == torch.uint64 else x.to(torch.int64)


def divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Quotients of 64-bit numbers without a sign, over their bits as int64."""
    half = torch.div((a >> 1) & (2**63 - 1), torch.where(b > 0, b, 1), rounding_mode="trunc") << 1
    quotient = half + below_or_equal(b, a - half * b).to(torch.int64)
    return torch.where(b < 0, below_or_equal(b, a).to(torch.int64), quotient)


def below_or_equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a ^ _SIGN) <= (b ^ _SIGN)


def shift_right(a: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """64 bits shifted, zeros coming in from above."""
    kept = torch.where(count > 0, (torch.ones_like(a) << (64 - count).clamp(max=63)) - 1, -1)
    return (a >> count) & kept
