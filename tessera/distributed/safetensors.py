"""Tensors in a file, in the safetensors format: written whole, read as pages of the file.

In: tensors by name, dense. Out: a file that any safetensors reader reads. Read again, the tensors lie in the file's own
pages, so that who wants a part of one reads that part. Nothing in such a file is ever run.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tessera.util.errors import InputError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
ALIGN = 64
NOTES = "__metadata__"


def write(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
    """Write a file and wait until it is on the disk. `notes` are texts that stand beside the tensors."""
    header, at = dict[str, dict]({NOTES: {"format": "pt", **(notes or {})}}), 0
    for name, x in tensors.items():
        if x.dtype not in CODES:
            raise InputError(f"{name}: expected one of {', '.join(map(str, CODES))}, got {x.dtype}")
        header[name] = {"dtype": CODES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            file.write(_bytes(x))
        file.flush()
        os.fsync(file.fileno())


def _bytes(x: Tensor) -> memoryview | bytes:
    flat = x.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""  # type: ignore[arg-type]


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, in its pages; they are not to be written."""
    header, body = _opened(path)
    return {name: _seen(body, row, f"{path}: {name}") for name, row in header.items() if name != NOTES}


def notes(path: Path) -> dict[str, str]:
    """The texts of a file."""
    texts = _opened(path)[0].get(NOTES, {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise InputError(f"{path}: expected {NOTES} to hold texts, got {texts}")
    return texts


def _opened(path: Path) -> tuple[dict, memoryview]:
    """The header, and the bytes behind it."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise InputError(f"{path}: expected a safetensors file, got {size} bytes")
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    (length,) = struct.unpack_from("<Q", data)
    try:
        header = json.loads(bytes(data[8 : 8 + length]))
    except ValueError as error:
        raise InputError(f"{path}: expected the header of a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise InputError(f"{path}: expected the header of a safetensors file, got {type(header).__name__}")
    return header, data[8 + length :]


def _seen(body: memoryview, row: object, where: str) -> Tensor:
    match row:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if code in DTYPES:
            fits = all(type(n) is int and n >= 0 for n in shape) and 0 <= begin <= end <= len(body)
            if fits and math.prod(shape) * DTYPES[code].itemsize == end - begin:
                data = torch.frombuffer(body[begin:end], dtype=torch.uint8) if end > begin else torch.empty(0).byte()
                aligned = data if begin % DTYPES[code].itemsize == 0 else data.clone()
                return aligned.view(DTYPES[code]).view(shape)
    raise InputError(f"{where}: expected a dtype, a shape and offsets within {len(body)} bytes, got {row}")
