"""Checkpoints that torch.distributed.checkpoint wrote.

In: a folder with its `.metadata`, which is a pickle, and its `.distcp` files. Out: a `Saved`. The pickle is read by an
unpickler that knows the names of DCP's data classes, dtypes and sizes; it makes records of ours for them, so no code
but ours runs, whatever the file says. Parts are read by `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.distributed.boxes import Box
from tessera.distributed.saved import Kept, Saved
from tessera.util.errors import InputError

METADATA = ".metadata"
_DATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
RECORDS = {
    (_DATA, "Metadata"), (_DATA, "MetadataIndex"), (_DATA, "TensorStorageMetadata"), (_DATA, "BytesStorageMetadata"),
    (_DATA, "ChunkStorageMetadata"), (_DATA, "TensorProperties"), (_DATA, "_MEM_FORMAT_ENCODING"),
    (_DATA, "StorageMeta"), (_FILES, "_StorageInfo"), ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Admits names; what they stand for is never looked up."""

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__(file)
        # of this file alone: a pickle may set attributes of what it was given
        self.record = type("Record", (), {"__new__": lambda cls, *args: object.__new__(cls), "__setstate__": _fill})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in RECORDS:
            return self.record
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"expected DCP's data classes alone, got {module}.{name}")


def _fill(record: object, state: object) -> None:
    if isinstance(state, dict):
        record.__dict__.update(state)


def of_dcp(folder: Path) -> Saved:
    metadata = _read(folder / METADATA)
    try:
        places = {(index.fqn, index.__dict__.get("offset")): row for index, row in metadata.storage_data.items()}
        paths = metadata.__dict__.get("planner_data") or {}
        tensors, objects = {}, {}
        for name, row in metadata.state_dict_metadata.items():
            path = tuple(paths.get(name, (name,)))
            if not hasattr(row, "chunks"):
                objects[path] = _reader(folder, places[name, None])
                continue
            boxes = [Box(_numbers(c.offsets), _numbers(c.sizes)) for c in row.chunks]
            parts = {box: _reader(folder, places[name, box.start]) for box in boxes}
            tensors[path] = Kept(_numbers(row.size), parts)  # type: ignore[arg-type]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / METADATA}: expected the metadata of a checkpoint: {error!r}") from error
    return Saved(folder, tensors, objects)


def _read(path: Path) -> Any:
    with open(path, "rb") as file:
        try:
            return _Unpickler(file).load()
        except Exception as error:  # a damaged pickle raises nearly anything
            raise InputError(f"{path}: {error}") from error


def _numbers(sizes: object) -> tuple[int, ...]:
    if not isinstance(sizes, tuple) or not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"expected sizes, got {sizes!r}")
    return sizes


def _reader(folder: Path, row: Any) -> Callable[[], Any]:
    """Reads a part of a file when it is called."""
    file, start, length = row.relative_path, row.offset, row.length
    if not isinstance(file, str) or file != os.path.basename(file):
        raise ValueError(f"expected files beside the metadata, got {file!r}")
    if changed := row.__dict__.get("transform_descriptors"):
        raise ValueError(f"expected parts as torch.save writes them, got some that went through {changed}")
    _numbers((start, length))

    def read() -> Tensor | object:
        with open(folder / file, "rb") as opened:
            opened.seek(start)
            data = io.BytesIO(opened.read(length))
        try:
            return torch.load(data, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise InputError(f"{folder / file}: expected a tensor or plain data at {start}: {error}") from error

    return read
