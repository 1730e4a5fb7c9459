"""Arithmetic, comparisons and logic, element by element, broadcast as in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import torch

from tessera.frontends.onnx.operators import unsigned
from tessera.frontends.onnx.operators.unsigned import wide, wide_ordered
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.values import is_known, number
from tessera.frontends.powers import power

Tensor = torch.Tensor


def _aligned(a: Tensor, b: Tensor, broadcast: int, axis: int | None) -> Tensor:
    """Before opset 7 the second operand's dimensions began at `axis` of the first's."""
    if not broadcast or axis is None or b.ndim == 0:
        return b
    axis = axis % a.ndim if axis < 0 else axis
    return b.reshape(*b.shape, *[1] * (a.ndim - axis - b.ndim))


def _binary(name: str, fn: Callable[[Tensor, Tensor], Tensor], kind: Callable = wide) -> None:
    run = kind(fn)

    @operator(name, 7)
    def new(a: Tensor, b: Tensor) -> Tensor:
        return run(a, b)

    @operator(name, 1, 6)
    def old(a: Tensor, b: Tensor, *, broadcast: int = 0, axis: int | None = None) -> Tensor:
        return run(a, _aligned(a, b, broadcast, axis))


def _divide(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.uint64:
        return unsigned.divide(a.view(torch.int64), b.view(torch.int64)).view(torch.uint64)
    return a / b if a.is_floating_point() or a.is_complex() else wide(_truncated)(a, b)


def _truncated(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _power(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_floating_point() and b.is_floating_point():
        return torch.pow(a.double(), b.double()).to(a.dtype)
    if a.is_floating_point() and b.numel() == 1 and b.ndim <= a.ndim and is_known(b):
        return power(a, number(b))  # squares and roots by their names
    return torch.pow(a, b.to(a.dtype) if b.is_floating_point() else b).to(a.dtype)


def _plain(fn: Callable) -> Callable:
    return fn


_binary("Add", torch.add)
_binary("Sub", torch.sub)
_binary("Mul", torch.mul)
_binary("Div", _divide, _plain)
_binary("Pow", wide(_power))
_binary("Equal", lambda a, b: a == b if isinstance(a, Tensor) else torch.from_numpy((a == b).astype(bool)))
_binary("Less", torch.lt, wide_ordered)
_binary("Greater", torch.gt, wide_ordered)
_binary("And", torch.logical_and)
_binary("Or", torch.logical_or)
_binary("Xor", torch.logical_xor)


@operator("LessOrEqual", 12)
@wide_ordered
def less_or_equal(a: Tensor, b: Tensor) -> Tensor:
    return a <= b


@operator("GreaterOrEqual", 12)
@wide_ordered
def greater_or_equal(a: Tensor, b: Tensor) -> Tensor:
    return a >= b


def _unary(name: str, fn: Callable[[Tensor], Tensor]) -> None:
    @operator(name)
    @wide
    def run(x: Tensor) -> Tensor:
        return fn(x)


@operator("Sign")
def sign(x: Tensor) -> Tensor:
    """Of NaN it is NaN, where PyTorch has 0."""
    if not x.dtype.is_signed:
        return x.to(torch.bool).to(x.dtype)
    return torch.where(x.isnan(), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


for _name, _fn in {
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Round": torch.round,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}.items():
    _unary(_name, _fn)


@operator("Abs")
def absolute(x: Tensor) -> Tensor:
    return x.clone() if x.dtype in unsigned.WIDE_UNSIGNED else torch.abs(x)


@operator("BitwiseAnd", 18)
@wide
def bitwise_and(a: Tensor, b: Tensor) -> Tensor:
    return torch.bitwise_and(a, b)


@operator("BitwiseOr", 18)
@wide
def bitwise_or(a: Tensor, b: Tensor) -> Tensor:
    return torch.bitwise_or(a, b)


@operator("BitwiseXor", 18)
@wide
def bitwise_xor(a: Tensor, b: Tensor) -> Tensor:
    return torch.bitwise_xor(a, b)


@operator("BitShift", 11)
def bit_shift(a: Tensor, b: Tensor, *, direction: str) -> Tensor:
    if direction == "LEFT":
        return wide(torch.bitwise_left_shift)(a, b)
    if a.dtype == torch.uint64:
        return unsigned.shift_right(a.view(torch.int64), b.view(torch.int64)).view(torch.uint64)
    return wide(torch.bitwise_right_shift)(a, b)


@operator("Mod", 10)
def mod(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    if a.dtype == torch.uint64:
        left, right = a.view(torch.int64), b.view(torch.int64)
        return (left - unsigned.divide(left, right) * right).view(torch.uint64)
    return wide(torch.fmod if fmod else torch.remainder)(a, b)


@operator("IsInf", 10)
def is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    infinite = torch.isinf(x)
    if not detect_negative:
        infinite = infinite & (x > 0)
    return infinite if detect_positive else infinite & (x < 0)


def _many(name: str, fn: Callable[[Tensor, Tensor], Tensor], kind: Callable = wide) -> None:
    run = kind(fn)

    @operator(name)
    def fold(*xs: Tensor) -> Tensor:
        return reduce(run, xs) if len(xs) > 1 else xs[0].clone()


_many("Sum", torch.add)
_many("Max", torch.maximum, wide_ordered)
_many("Min", torch.minimum, wide_ordered)


@operator("Mean")
def mean(*xs: Tensor) -> Tensor:
    return reduce(torch.add, xs) / len(xs)


@operator("Where", 9, moves=True)
def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


@operator("Clip", 11)
@wide_ordered
def clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    # The upper bound wins where the two cross.
    if low is not None:
        x = torch.maximum(x, low.to(x.dtype))
    return torch.minimum(x, high.to(x.dtype)) if high is not None else x.clone() if low is None else x


@operator("Clip", 1, 10)
def clip_between(x: Tensor, *, min: float = -math.inf, max: float = math.inf) -> Tensor:
    return torch.clamp(x, min, max)
