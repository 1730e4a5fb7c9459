"""What a checkpoint holds, whoever wrote it: whole sizes by name, and where the parts of each tensor are.

In: the folder of an index of ours, or safetensors files, whole or as torch.distributed.checkpoint cuts them. Out: a
`Saved`. A part is read when somebody wants a box that overlaps it, and nothing in the files is ever run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tessera.distributed import safetensors
from tessera.distributed.boxes import Box, box_of, overlap, own
from tessera.util.errors import InputError

INDEX, FORMAT = "index.json", "tessera state 1"
PLAIN_INDEX = "model.safetensors.index.json"
SHARDS, START = "DCP_SHARDING_INFO", "saved_offsets"  # as torch.distributed.checkpoint notes parts in safetensors


@dataclass(frozen=True)
class Kept:
    """A tensor of a checkpoint. Parts do not overlap, but where the same box was written twice."""

    shape: tuple[int, ...]
    parts: dict[Box, Callable[[], Tensor]]

    def read_into(self, x: Tensor, name: str) -> None:
        """Fill a tensor, or this rank's part of one."""
        here = box_of(x)
        target, filled = own(x, here), 0
        for there, read in self.parts.items():
            common = overlap(here, there)
            if common is not None:
                part = read()
                if not isinstance(part, Tensor) or tuple(part.shape) != there.size:
                    raise InputError(f"{name}: expected a part of {there.size} elements, got {part!r:.60}")
                common.of(target, here).copy_(common.of(part, there))
                filled += math.prod(common.size)
        if filled != math.prod(here.size):
            raise InputError(f"{name}: expected {math.prod(here.size)} elements at {here.start}, got {filled}")

    def whole(self, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        x = torch.empty(self.shape, dtype=dtype)
        self.read_into(x, name)
        return x


@dataclass(frozen=True)
class Saved:
    """Tensors and other things by their path; a model's own names are the last words of such paths."""

    where: Path
    tensors: dict[tuple, Kept]
    objects: dict[tuple, Callable[[], object]] = field(default_factory=dict)
    groups: list | None = None  # of the optimizer, as `optimizer_slots` tells them; None: look among the objects


def of_index(folder: Path) -> Saved:
    """What `save_state` wrote."""
    data = json.loads((folder / INDEX).read_text())
    if data.get("format") != FORMAT:
        raise InputError(f"{folder}: expected a {FORMAT!r}, got {data.get('format')!r}")
    files, tensors = _Files(folder), {}
    for name, row in data["tensors"].items():
        parts = {Box(tuple(start), tuple(size)): files.part(file, name) for file, start, size in row["parts"]}
        tensors[(name,)] = Kept(tuple(row["shape"]), parts)
    return Saved(folder, tensors, groups=data["groups"])


def of_safetensors(path: Path) -> Saved:
    """One file; or a folder of them, those that its index names or all there are."""
    folder, names = path.parent, [path.name]
    if path.is_dir():
        folder, names = path, sorted(file.name for file in path.glob("*.safetensors"))
        if (path / PLAIN_INDEX).exists():
            names = sorted(set(json.loads((path / PLAIN_INDEX).read_text())["weight_map"].values()))
    files, parts = _Files(folder), dict[str, dict[Box, Callable[[], Tensor]]]()
    for file in names:
        starts = json.loads(safetensors.notes(files.path(file)).get(SHARDS, "{}"))
        for name, x in files.open(file).items():
            start = starts[name][START] if name in starts else [0] * x.ndim
            parts.setdefault(name, {})[Box(tuple(start), tuple(x.shape))] = files.part(file, name)
    return Saved(path, {(name,): Kept(_whole_shape(list(held)), held) for name, held in parts.items()})


def _whole_shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    ends = [[at + n for at, n in zip(box.start, box.size, strict=True)] for box in boxes]
    return tuple(map(max, zip(*ends, strict=True)))


def starts_noted(boxes: dict[str, Box]) -> dict[str, str]:
    """Where the parts in a file begin, as torch.distributed.checkpoint reads it."""
    return {SHARDS: json.dumps({name: {START: list(box.start)} for name, box in boxes.items()})}


class _Files:
    """The files of a folder, each opened once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open = cache(lambda file: safetensors.read(self.path(file)))

    def path(self, file: str) -> Path:
        if file != os.path.basename(file):
            raise InputError(f"{self.folder}: expected files beside the index, got {file!r}")
        return self.folder / file

    def part(self, file: str, name: str) -> Callable[[], Tensor]:
        return lambda: self.open(file)[name]
