"""Casts between element types, and bits looked at as another type."""

from __future__ import annotations

import numpy as np
import torch

from tessera.frontends.onnx import elements
from tessera.frontends.onnx.elements import BITS, DTYPES, FLOAT8, FLOAT8_DTYPES, RANGES, STRING, Narrow, code_of
from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.tensors import of_patterns
from tessera.frontends.onnx.values import contents

Tensor = torch.Tensor
Value = object
_LARGEST = {
    elements.FLOAT8E4M3FN: 448.0,
    elements.FLOAT8E4M3FNUZ: 240.0,
    elements.FLOAT8E5M2: 57344.0,
    elements.FLOAT8E5M2FNUZ: 57344.0,
}
# The largest number that rounds to the largest element.
_LAST_BELOW = {
    elements.FLOAT8E4M3FN: 464.0,
    elements.FLOAT8E4M3FNUZ: 247.999,
    elements.FLOAT8E5M2: 61439.99,
    elements.FLOAT8E5M2FNUZ: 61439.99,
}


def cast_to(x: Value, code: int, saturate: int = 1, round_mode: str = "up") -> Value:
    """A value as one of another element type."""
    if isinstance(x, np.ndarray):
        return _of_strings(x, code)
    data = x.data if isinstance(x, Narrow) else x
    assert isinstance(data, Tensor)
    if code == STRING:
        return _as_strings(data)
    if code in RANGES:
        return Narrow(_wrapped(data, code), code)
    if elements.is_small_float(code):
        return Narrow(nearest(_float(data), code), code)
    if code == elements.FLOAT8E8M0:
        return to_e8m0(_float(data), saturate, round_mode)
    if code in FLOAT8:
        return to_float8(data, code, saturate)
    return _plain(data, DTYPES[code])


def _plain(data: Tensor, dtype: torch.dtype) -> Tensor:
    if data.dtype in FLOAT8_DTYPES:
        data = data.float()
    if dtype.is_complex or not data.is_complex():
        return data.clone() if data.dtype == dtype else data.to(dtype)
    return data.real.to(dtype)


def _float(data: Tensor) -> Tensor:
    return data if data.dtype == torch.float64 else data.float()


def _wrapped(data: Tensor, code: int) -> Tensor:
    """The low bits of a whole number."""
    low, high = RANGES[code]
    if data.dtype in FLOAT8_DTYPES:
        data = data.float()
    whole = data.to(torch.int32)
    bits = whole & (2 ** BITS[code] - 1)
    return torch.where(bits > high, bits - 2 ** BITS[code], bits).to(elements.CARRIERS[code])


def nearest(x: Tensor, code: int) -> Tensor:
    """Elements rounded to those of a small float type, ties to even; beyond the largest, the largest."""
    positive = elements.float_values(code)[: 2 ** (BITS[code] - 1)]
    size = x.abs()
    out = torch.zeros_like(size)
    for i in range(1, len(positive)):
        middle = (positive[i - 1] + positive[i]) / 2
        above = size >= middle if i % 2 == 0 else size > middle  # the pattern i is even: it takes the tie
        out = torch.where(above, positive[i], out)
    # There is no NaN: it becomes minus zero.
    return torch.where(torch.isnan(x), -0.0, torch.copysign(out, x)).float()


def to_float8(data: Tensor, code: int, saturate: int) -> Tensor:
    x = data if data.is_floating_point() and data.dtype not in FLOAT8_DTYPES else data.float()
    if x.dtype == torch.float64:
        x = x.float()
    largest = _LARGEST[code]
    if saturate:
        return x.clamp(-largest, largest).to(DTYPES[code])
    # Past the largest there is infinity, or NaN in types that have none; halfway to the next one up still rounds down.
    beyond = torch.where(x > 0, torch.inf, -torch.inf) if code == elements.FLOAT8E5M2 else torch.nan
    return torch.where(x.float().abs() > _LAST_BELOW[code], beyond, x.float()).to(DTYPES[code])


def to_e8m0(x: Tensor, saturate: int, round_mode: str) -> Tensor:
    """Powers of two from 2^-127 to 2^127; the bits are the exponent, and 255 is NaN."""
    size = x.abs().float()
    bits = size.view(torch.int32)
    exponent, rest = bits >> 23, bits & 0x7FFFFF
    if round_mode == "up":
        more = (rest > 0) & ((exponent > 0) | (rest > 0x400000))
    elif round_mode == "nearest":
        more = rest >= 0x400000
        more = torch.where(exponent == 0, rest > 0x400000, more)
    else:
        more = torch.zeros_like(rest, dtype=torch.bool)
    powers = exponent + more.to(torch.int32)
    top = 254 if saturate else 255
    powers = torch.where(torch.isinf(size), top, powers.clamp(0, top))
    powers = torch.where(torch.isnan(x), 255, powers)
    return powers.to(torch.uint8).view(torch.float8_e8m0fnu)


def _as_strings(data: Tensor) -> np.ndarray:
    contents(data, "strings are Python values")
    kind = np.float32 if data.dtype == torch.float32 else None
    values = _plain(data, torch.float32) if data.dtype in (torch.bfloat16, *FLOAT8_DTYPES) else data
    array = values.numpy() if kind is None else values.numpy().astype(kind)
    texts = np.empty(array.size, dtype=object)
    texts[:] = [_text(v) for v in array.ravel()]
    return texts.reshape(array.shape)


def _text(v: np.generic) -> str:
    if isinstance(v, np.floating):
        if np.isnan(v):
            return "NaN"
        if np.isinf(v):
            return "INF" if v > 0 else "-INF"
        return np.format_float_positional(v, trim="-") if 1e-5 <= abs(v) < 1e16 or v == 0 else str(v)
    return str(v.item())


def _of_strings(x: np.ndarray, code: int) -> Value:
    if code == STRING:
        return x.copy()
    try:
        if code in DTYPES and not DTYPES[code].is_floating_point:
            values: list = [int(float(s)) if "." in s or "e" in s.lower() else int(s) for s in x.ravel()]
        else:
            values = [float(s) for s in x.ravel()]
    except ValueError as error:
        raise OnnxError(f"Cast: expected strings that are numbers: {error}") from error
    wide = torch.float64 if values and isinstance(values[0], float) else torch.int64
    return cast_to(torch.tensor(values, dtype=wide).reshape(x.shape), code)


_NAMES = {
    "FLOAT": 1,
    "DOUBLE": 11,
    "INT32": 6,
    "INT64": 7,
    "BOOL": 9,
    "FLOAT16": 10,
    "UINT8": 2,
    "INT8": 3,
    "STRING": 8,
}


@operator("Cast", 6)
def cast(x: Value, *, to: int, saturate: int = 1, round_mode: str = "up") -> Value:
    return cast_to(x, to, saturate, round_mode)


@operator("Cast", 1, 5)
def cast_by_name(x: Value, *, to: str | int) -> Value:
    return cast_to(x, _NAMES[to.upper()] if isinstance(to, str) else to)


@operator("CastLike", 15)
def cast_like(x: Value, like: Value, *, saturate: int = 1, round_mode: str = "up") -> Value:
    return cast_to(x, code_of(like), saturate, round_mode)


@operator("BitCast", 26)
def bit_cast(x: Value, *, to: int) -> Value:
    """The same bits, as elements of another type of the same width."""
    if isinstance(x, Narrow):
        if BITS.get(to) != BITS[x.code]:
            raise OnnxError("BitCast: expected types of the same width")
        patterns = x.data.to(torch.int32) & (2 ** BITS[x.code] - 1)
        return of_patterns(patterns, to)
    assert isinstance(x, Tensor)
    if to not in DTYPES or DTYPES[to].itemsize != x.element_size():
        raise OnnxError("BitCast: expected types of the same width")
    if DTYPES[to] == torch.bool or x.dtype == torch.bool:
        return x.to(torch.uint8).view(DTYPES[to]) if x.dtype == torch.bool else x.view(torch.uint8) != 0
    return x.view(DTYPES[to])
