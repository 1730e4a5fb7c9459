"""ONNX's element types, and the torch dtype that carries each.

PyTorch has no tensors of 2, 4 or 6 bits that it computes with. A `Narrow` holds the elements of one, a byte or a float
each, beside the type that they are; operators that only move elements take it as it is, and casts know it.
Strings are NumPy arrays of objects.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

FLOAT, UINT8, INT8, UINT16, INT16, INT32, INT64, STRING, BOOL, FLOAT16, DOUBLE = range(1, 12)
UINT32, UINT64, COMPLEX64, COMPLEX128, BFLOAT16 = range(12, 17)
FLOAT8E4M3FN, FLOAT8E4M3FNUZ, FLOAT8E5M2, FLOAT8E5M2FNUZ = range(17, 21)
UINT4, INT4, FLOAT4E2M1, FLOAT8E8M0, UINT2, INT2, FLOAT6E2M3, FLOAT6E3M2 = range(21, 29)

DTYPES: dict[int, torch.dtype] = {
    FLOAT: torch.float32,
    UINT8: torch.uint8,
    INT8: torch.int8,
    UINT16: torch.uint16,
    INT16: torch.int16,
    INT32: torch.int32,
    INT64: torch.int64,
    BOOL: torch.bool,
    FLOAT16: torch.float16,
    DOUBLE: torch.float64,
    UINT32: torch.uint32,
    UINT64: torch.uint64,
    COMPLEX64: torch.complex64,
    COMPLEX128: torch.complex128,
    BFLOAT16: torch.bfloat16,
    FLOAT8E4M3FN: torch.float8_e4m3fn,
    FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    FLOAT8E5M2: torch.float8_e5m2,
    FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    FLOAT8E8M0: torch.float8_e8m0fnu,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# Types without a dtype: what carries their elements, and how many bits one takes in a file.
CARRIERS: dict[int, torch.dtype] = {
    UINT4: torch.uint8,
    INT4: torch.int8,
    UINT2: torch.uint8,
    INT2: torch.int8,
    FLOAT4E2M1: torch.float32,
    FLOAT6E2M3: torch.float32,
    FLOAT6E3M2: torch.float32,
}
BITS = {UINT4: 4, INT4: 4, UINT2: 2, INT2: 2, FLOAT4E2M1: 4, FLOAT6E2M3: 6, FLOAT6E3M2: 6}
RANGES = {UINT4: (0, 15), INT4: (-8, 7), UINT2: (0, 3), INT2: (-2, 1)}
_SMALL_FLOATS = {FLOAT4E2M1: (2, 1), FLOAT6E2M3: (2, 3), FLOAT6E3M2: (3, 2)}  # bits of exponent and of mantissa
FLOAT8 = {FLOAT8E4M3FN, FLOAT8E4M3FNUZ, FLOAT8E5M2, FLOAT8E5M2FNUZ, FLOAT8E8M0}
FLOAT8_DTYPES = {DTYPES[code] for code in FLOAT8}
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True, eq=False)
class Narrow:
    """A tensor of a type that PyTorch has no dtype for: one carrier element for each element."""

    data: torch.Tensor
    code: int

    @property
    def shape(self) -> torch.Size:
        return self.data.shape


def code_of(x: object) -> int:
    """The ONNX element type of a value."""
    if isinstance(x, Narrow):
        return x.code
    if isinstance(x, np.ndarray):
        return STRING
    return CODES[x.dtype]  # type: ignore[attr-defined]


def carrier(code: int) -> torch.dtype:
    return DTYPES[code] if code in DTYPES else CARRIERS[code]


def wrap(data: torch.Tensor, code: int) -> torch.Tensor | Narrow:
    """Elements as a value of the type that `code` says."""
    return data if code in DTYPES else Narrow(data, code)


def float_values(code: int) -> list[float]:
    """What each bit pattern of a small float stands for, smallest pattern first."""
    exponent_bits, mantissa_bits = _SMALL_FLOATS[code]
    bias, scale = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    positive = []
    for pattern in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(pattern, scale)
        if exponent:
            positive.append((1 + mantissa / scale) * 2.0 ** (exponent - bias))
        else:
            positive.append(mantissa / scale * 2.0 ** (1 - bias))
    return [*positive, *(-x for x in positive)]


def is_small_float(code: int) -> bool:
    return code in _SMALL_FLOATS
