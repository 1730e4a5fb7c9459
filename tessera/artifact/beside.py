"""Weights in a safetensors file beside the artifact, which several artifacts share.

In: parameters and buffers on their way into a file, and the name of the one beside it. Out: what the manifest says of
that file: name, size, SHA-256, and the tensors that are taken from it. A file that is there already is used as it is:
what it holds must be what the model has, and what it does not hold goes into the artifact. Read again, the file is
opened inside the artifact's folder alone (`util/inside.py`), and mapped.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tessera.artifact.container import Container
from tessera.artifact.weights import Shelf, memory_of, stored_as, tensors_in
from tessera.util.errors import ArtifactError, OptionError
from tessera.util.files import written_whole
from tessera.util.inside import OutsideError, open_inside

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.safetensors")
CHECKED = 64 << 20  # bytes of weights whose SHA-256 is compared even where nobody asks


# --- writing ---


def share(path: Path, name: str, shelf: Shelf) -> dict[str, object]:
    """What the manifest says of the file `name` beside `path`, which is written where it is not there."""
    if not NAME.fullmatch(name):
        raise OptionError(f"weights: expected the name of a file beside the artifact, x.safetensors, got {name!r}")
    place, listed = path.parent / name, list(shelf.tensors)
    if not os.path.lexists(place):
        with written_whole(place) as file:
            for chunk in shelf.chunks():
                file.write(chunk)
    with _opened(path.parent, name, str(place), OptionError) as file:
        data = _map(file)
        listed = _same(tensors_in(data, {}, str(place)), shelf, str(place))
        return {"file": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "tensors": listed}


def _same(stored: dict[str, torch.Tensor], shelf: Shelf, where: str) -> list[str]:
    """The tensors of the shelf that the file holds. One of the same name that differs is somebody else's."""
    shared = [name for name in shelf.tensors if name in stored]
    for name in shared:
        x, known = shelf.tensors[name], stored[name]
        if stored_as(known) != stored_as(x) or not np.array_equal(memory_of(known), memory_of(x)):
            raise OptionError(f"weights: {where} holds another {name!r} than the model; choose another name")
    return shared


# --- reading ---


@dataclass(frozen=True)
class Beside:
    """The file that a manifest names."""

    name: str
    size: int
    sha256: str
    tensors: tuple[str, ...]


def beside_of(container: Container) -> Beside | None:
    match container.manifest.get("beside"):
        case None:
            return None
        case {"file": str(name), "size": int(size), "sha256": str(digest), "tensors": list(tensors)}:
            hashed = re.fullmatch("[0-9a-f]{64}", digest)
            if NAME.fullmatch(name) and hashed and size >= 0 and all(isinstance(t, str) for t in tensors):
                return Beside(name, size, digest, tuple(tensors))
    told = str(container.manifest["beside"])[:120]
    raise container.wrong("beside", f"expected a file's name, its size, SHA-256 and tensors, got {told}")


def weights_of(container: Container, verify: bool | None = None) -> tuple[dict[str, torch.Tensor], int]:
    """All weights of an artifact, and how many bytes they are. `verify` compares SHA-256, None of small ones alone."""
    views = container.manifest.get("views", {})
    inside = container.member(container.manifest.get("weights"))
    if verify or (verify is None and inside.size <= CHECKED):
        container.verify(inside.name)
    tensors = tensors_in(container.map(inside.name), views, f"{container.path}: {inside.name}")
    beside = beside_of(container)
    if beside is None:
        return tensors, inside.size
    shared = _read(container, beside, views, verify or (verify is None and beside.size <= CHECKED))
    if both := sorted(shared.keys() & tensors.keys()):
        raise container.wrong("beside", f"expected {both[0][:80]!r} once, listed inside the artifact too")
    return {**shared, **tensors}, inside.size + beside.size


def verify_beside(container: Container) -> None:
    beside = beside_of(container)
    if beside is not None:
        _read(container, beside, container.manifest.get("views", {}), True)


def _read(container: Container, beside: Beside, views: object, verify: bool) -> dict[str, torch.Tensor]:
    where = f"{container.path}: weights in {beside.name}"
    with _opened(container.path.parent, beside.name, where, ArtifactError) as file:
        size = os.fstat(file).st_size
        if size != beside.size:
            raise ArtifactError(f"{where}: expected {beside.size} bytes, got {size}: another file has its name")
        data = _map(file)
        if verify and hashlib.sha256(data).hexdigest() != beside.sha256:
            raise ArtifactError(f"{where}: its SHA-256 is not the one listed: it is damaged, or another file")
        return tensors_in(data, views, where, frozenset(beside.tensors))


@contextmanager
def _opened(folder: Path, name: str, where: str, wrong: type[Exception]) -> Iterator[int]:
    try:
        file = open_inside(str(folder), name)
    except OutsideError as error:
        raise wrong(f"{where}: {error}") from error
    try:
        yield file
    finally:
        os.close(file)


def _map(file: int) -> memoryview:
    size = os.fstat(file).st_size
    return memoryview(mmap.mmap(file, size, access=mmap.ACCESS_COPY)) if size else memoryview(b"")
