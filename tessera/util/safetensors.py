"""The safetensors format: a table of tensors in JSON, then their bytes.

In: a table, or the bytes of a file. Out: the head of a file, or the table and where each tensor lies. Every number is
checked against the bytes that are there; what does not fit is `Unfit`, and whoever reads says what it was reading.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping

import torch

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
NOTES = "__metadata__"  # in place of a tensor's name: texts


class Unfit(ValueError):
    """Bytes that are no such file."""


def flat_bytes(x: torch.Tensor) -> torch.Tensor:
    """The elements row by row, as bytes. A tensor of one element may have any stride, which a view as bytes minds."""
    flat = x.detach().cpu().contiguous().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def head(table: Mapping[str, object], align: int) -> bytes:
    """What stands before the tensors' bytes, which begin at a multiple of `align`."""
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % align)
    return struct.pack("<Q", len(text)) + text


def row(code: str, shape: list[int], at: int, size: int) -> dict[str, object]:
    """What the table says of a tensor."""
    return {"dtype": code, "shape": shape, "data_offsets": [at, at + size]}


def split(data: memoryview, most: int) -> tuple[bytes, memoryview]:
    """The table's text, of at most so many bytes, and what is behind it."""
    if len(data) < 8:
        raise Unfit(f"expected a safetensors header, got {len(data)} bytes")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(most, len(data) - 8):
        raise Unfit(f"a header of {length} bytes in {len(data)}")
    return bytes(data[8 : 8 + length]), data[8 + length :]


def place(row: object, size: int) -> tuple[torch.dtype, list[int], int, int]:
    """The dtype and shape of a tensor, and where it begins and ends within `size` bytes."""
    match row:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if code in DTYPES:
            dtype = DTYPES[code]
            sizes = len(shape) <= 64 and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
            if sizes and 0 <= begin <= end <= size and math.prod(shape) * dtype.itemsize == end - begin:
                return dtype, shape, begin, end
    raise Unfit(f"expected a dtype, a shape and offsets that fit {size} bytes, got {str(row)[:120]}")
