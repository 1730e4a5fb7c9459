"""`.spatial` files: a zip archive, without compression, of the listing or chain, the machine's file and the data.

In: a program. Out: a file, and the same program from it. Members are read by size: what the archive claims is checked
against the file before memory is taken. Data is safetensors, so nothing is ever unpickled. The data of a chain is a
member for each run, which is written and read by itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch

from tessera.machines.spatial import SpatialMachine, read
from tessera.spatial.listing.chain import Chain, parse_chain, print_chain
from tessera.spatial.listing.parse import parse
from tessera.spatial.listing.text import print_listing
from tessera.spatial.listing.types import SIZES, Listing
from tessera.util.errors import ListingError, MachineError
from tessera.util.safetensors import CODES, NOTES, Unfit, flat_bytes, head, place, row, split

LISTING, CHAIN, MACHINE, DATA = "listing.txt", "chain.txt", "machine.toml", "data.safetensors"
LONGEST_HEADER, ALIGN = 100 << 20, 8
_DATE = (1980, 1, 1, 0, 0, 0)  # the same program is the same file


@dataclass(frozen=True)
class Program:
    """All that a run needs: the listing, the machine it is for, the tensors that lie beside it."""

    listing: Listing
    machine: SpatialMachine
    data: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ChainedProgram:
    """The same of a chain; `data` gives the tensors of a run by its name."""

    chain: Chain
    machine: SpatialMachine
    data: Callable[[str], Mapping[str, torch.Tensor]]


def save(program: Program | ChainedProgram, path: str | Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in _members(program):
            archive.writestr(zipfile.ZipInfo(name, _DATE), content)


def _members(program: Program | ChainedProgram) -> Iterator[tuple[str, bytes]]:
    if isinstance(program, Program):
        yield LISTING, print_listing(program.listing).encode()
        yield MACHINE, program.machine.text.encode()
        yield DATA, pack(program.data)
    else:
        yield CHAIN, print_chain(program.chain).encode()
        yield MACHINE, program.machine.text.encode()
        for run in program.chain.runs:
            yield _data_of(run.name), pack(program.data(run.name))


def _data_of(run: str) -> str:
    return f"data/{run}.safetensors"


def load(path: str | Path) -> Program | ChainedProgram:
    path = Path(path)
    if not path.is_file():
        raise ListingError(f"{path}: there is no such file")
    with _opened(path) as archive:
        is_chain = CHAIN in archive.namelist()
        text, described = (_member(archive, name).decode() for name in (CHAIN if is_chain else LISTING, MACHINE))
        if is_chain:
            chain = parse_chain(text)
            if not chain.parts:
                raise ListingError("expected a chain with parts")
            described_machine = read(next(iter(chain.parts.values())).machine, described)
            return ChainedProgram(chain, described_machine, functools.partial(_tensors, path))
        listing = parse(text)
        return Program(listing, read(listing.machine, described), unpack(_member(archive, DATA)))


def _tensors(path: Path, run: str) -> dict[str, torch.Tensor]:
    with _opened(path) as archive:
        return unpack(_member(archive, _data_of(run)))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Whatever is wrong with a file is said with its path."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, UnicodeDecodeError, NotImplementedError, EOFError) as error:
        raise ListingError(f"{path}: expected a .spatial file: {error}") from None
    except (ListingError, MachineError) as error:
        raise ListingError(f"{path}: {error}") from None


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise ListingError(f"expected a listing or chain, a machine and their data in it; {name} is missing") from None
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > os.path.getsize(archive.filename or ""):
        raise ListingError(f"expected {name} without compression, of at most the file's size")
    return archive.read(info)


def pack(data: Mapping[str, torch.Tensor]) -> bytes:
    """As safetensors."""
    header: dict[str, object] = {}
    parts, at = [], 0
    for name, tensor in sorted(data.items()):
        flat = flat_bytes(tensor)
        header[name] = row(CODES[tensor.dtype], list(tensor.shape), at, flat.numel())
        parts.append(flat.numpy().tobytes())
        at += flat.numel()
    return head(header, ALIGN) + b"".join(parts)


def unpack(content: bytes) -> dict[str, torch.Tensor]:
    """From safetensors; every number of the header is checked."""
    try:
        text, body = split(memoryview(content), LONGEST_HEADER)
    except Unfit:
        _refuse("a header of safetensors")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        _refuse("a header of JSON")
    if not isinstance(header, dict):
        _refuse("names and places in the header")
    body = bytearray(body)
    return {name: _tensor(name, told, body) for name, told in header.items() if name != NOTES}


def _tensor(name: str, told: object, body: bytearray) -> torch.Tensor:
    try:
        dtype, shape, begin, end = place(told, len(body))
    except Unfit as error:
        _refuse(f"dtype, shape and data_offsets of {name[:100]!r}: {error}")
    listed = str(dtype).removeprefix("torch.") in SIZES
    if not listed or len(shape) > 8 or any(size > 1 << 48 for size in shape):
        _refuse(f"{name[:100]!r} of a type and at most 8 sizes that listings know, got {dtype} {shape[:8]}")
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    data = torch.frombuffer(body, dtype=torch.uint8, count=end - begin, offset=begin)
    return data.clone().view(dtype).reshape(shape)


def _refuse(expected: str) -> NoReturn:
    raise ListingError(f"{DATA}: expected {expected}")
