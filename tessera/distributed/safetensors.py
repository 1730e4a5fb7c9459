"""Tensors in a file, in the safetensors format: written whole, read as pages of the file.

In: tensors by name, dense. Out: a file that any safetensors reader reads. Read again, the tensors lie in the file's own
pages, so that who wants a part of one reads that part. Nothing in such a file is ever run.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tessera.util.errors import InputError
from tessera.util.safetensors import CODES, NOTES, Unfit, flat_bytes, head, place, row, split

ALIGN = 64
MOST_HEADER = 1 << 30


def write(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
    """Write a file and wait until it is on the disk. `notes` are texts that stand beside the tensors."""
    header, at = dict[str, dict]({NOTES: {"format": "pt", **(notes or {})}}), 0
    for name, x in tensors.items():
        if x.dtype not in CODES:
            raise InputError(f"{name}: expected one of {', '.join(map(str, CODES))}, got {x.dtype}")
        header[name] = row(CODES[x.dtype], list(x.shape), at, x.nbytes)
        at += x.nbytes
    with open(path, "wb") as file:
        file.write(head(header, ALIGN))
        for x in tensors.values():
            file.write(_bytes(x))
        file.flush()
        os.fsync(file.fileno())


def _bytes(x: Tensor) -> memoryview | bytes:
    return memoryview(flat_bytes(x).numpy()) if x.numel() else b""  # type: ignore[arg-type]


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, in its pages; they are not to be written."""
    header, body = _opened(path)
    return {name: _seen(body, told, f"{path}: {name}") for name, told in header.items() if name != NOTES}


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
    try:
        text, body = split(data, MOST_HEADER)
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected the header of a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise InputError(f"{path}: expected the header of a safetensors file, got {type(header).__name__}")
    return header, body


def _seen(body: memoryview, told: object, where: str) -> Tensor:
    try:
        dtype, shape, begin, end = place(told, len(body))
    except Unfit:
        expected = f"a dtype, a shape and offsets within {len(body)} bytes"
        raise InputError(f"{where}: expected {expected}, got {told}") from None
    data = torch.frombuffer(body[begin:end], dtype=torch.uint8) if end > begin else torch.empty(0).byte()
    aligned = data if begin % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype).view(shape)
