"""Element types of tile values and PyTorch's dtypes, both ways. i1 is `torch.bool`: one byte in memory."""

from __future__ import annotations

import torch
from xdsl.dialects.builtin import (
    BFloat16Type,
    Float8E4M3FNType,
    Float8E5M2Type,
    Float16Type,
    Float32Type,
    Float64Type,
    IntegerType,
    Signedness,
)
from xdsl.ir import Attribute

from tessera.util.errors import OptionError

_PAIRS: list[tuple[Attribute, torch.dtype]] = [
    (Float8E4M3FNType(), torch.float8_e4m3fn),
    (Float8E5M2Type(), torch.float8_e5m2),
    (Float16Type(), torch.float16),
    (BFloat16Type(), torch.bfloat16),
    (Float32Type(), torch.float32),
    (Float64Type(), torch.float64),
    (IntegerType(1), torch.bool),
    (IntegerType(8), torch.int8),
    (IntegerType(8, Signedness.UNSIGNED), torch.uint8),
    (IntegerType(16), torch.int16),
    (IntegerType(32), torch.int32),
    (IntegerType(64), torch.int64),
]
_DTYPES = dict(_PAIRS)
_ELEMENTS = {dtype: element for element, dtype in _PAIRS}


def torch_dtype(element: Attribute) -> torch.dtype:
    if element not in _DTYPES:
        raise OptionError(f"expected one of the element types {', '.join(map(str, _DTYPES))}, got {element}")
    return _DTYPES[element]


def element_of_dtype(dtype: torch.dtype) -> Attribute:
    if dtype not in _ELEMENTS:
        raise OptionError(f"expected one of the dtypes {', '.join(map(str, _ELEMENTS))}, got {dtype}")
    return _ELEMENTS[dtype]
