"""`save_state`, `load_state`: a model and its optimizer on the disk, from any mesh to any other.

    index.json           what there is: whole sizes by the model's own names, and which box is in which file
    rank_0.safetensors   the parts that a rank wrote

In: a model, sharded or not, and an optimizer. Out: files of plain data. Each part is written once, by the first of the
ranks that hold it. Who loads reads the boxes that overlap its own, so strategy, mesh and number of ranks are free. A
save goes to a folder of its own and takes the place of the last one when all ranks have written; one that is
interrupted leaves the last good one.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.distributed import safetensors
from tessera.distributed.boxes import Box, box_of, overlap, own, writes
from tessera.distributed.optimizer_slots import groups_of, load_groups, slots_of
from tessera.distributed.sharding import pipeline_axis
from tessera.util.errors import InputError

NEW, NOW, OLD = ".new", "state", ".old"
INDEX, FORMAT = "index.json", "tessera state 1"


def save_state(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write a model's state, and its optimizer's, into the folder `path`. All ranks call it."""
    folder, rank = Path(path), _rank()
    if rank == 0:
        shutil.rmtree(folder / NEW, ignore_errors=True)
        (folder / NEW).mkdir(parents=True)
    _meet()
    everything = _tensors(model, optimizer)
    apart = pipeline_axis(model)
    mine = {name: (x, box) for name, x in everything.items() if writes(x, apart) and not (box := box_of(x)).is_empty}
    file = f"rank_{rank}.safetensors"
    safetensors.write(folder / NEW / file, {name: own(x, box) for name, (x, box) in mine.items()})
    every = _gathered({name: [file, list(box.start), list(box.size)] for name, (_, box) in mine.items()})
    if rank == 0:
        tensors = {name: _row(x, [parts[name] for parts in every if name in parts]) for name, x in everything.items()}
        groups = [] if optimizer is None else groups_of(model, optimizer)
        (folder / NEW / INDEX).write_text(json.dumps({"format": FORMAT, "tensors": tensors, "groups": groups}))
        _take_place(folder)
    _meet()


def _row(x: Tensor, parts: list) -> dict:
    return {"shape": list(x.shape), "dtype": safetensors.CODES[x.dtype], "parts": parts}


def load_state(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read what `save_state` wrote into a model and its optimizer, in place. All ranks call it."""
    folder = _last_good(Path(path))
    saved = _Saved.open(folder)
    weights = _tensors(model, None)
    _check(saved, weights, folder)
    with torch.no_grad():
        for name, x in weights.items():
            saved.read(name, x)
        if optimizer is not None:
            load_groups(model, optimizer, saved.groups)
            for name, x in slots_of(model, optimizer, saved.tensors).items():
                saved.read(name, x)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Everything that is kept, by name: weights and buffers as the model calls them, then the optimizer's."""
    kept = set(model.state_dict())
    named = {n: x for n, x in (*model.named_parameters(), *model.named_buffers()) if n in kept}
    return named if optimizer is None else {**named, **slots_of(model, optimizer)}


def _check(saved: _Saved, weights: Mapping[str, Tensor], folder: Path) -> None:
    """The state is this model's."""
    held = {name for name in saved.tensors if not name.startswith("optimizer.")}
    for name in sorted(weights.keys() - held):
        near = ", ".join(difflib.get_close_matches(name, held, 3, 0.3)) or "none"
        raise InputError(f"load_state: {folder} has no {name}, which the model has; near are {near}")
    for name in sorted(held - weights.keys()):
        raise InputError(f"load_state: {folder} has {name}, which the model has not; is it of another model?")
    for name, x in weights.items():
        if tuple(saved.tensors[name]["shape"]) != tuple(x.shape):
            raise InputError(f"load_state: {name}: expected {list(x.shape)}, got {saved.tensors[name]['shape']}")


@dataclass
class _Saved:
    folder: Path
    tensors: dict[str, dict]
    groups: list
    files: dict[str, dict[str, Tensor]]  # opened so far

    @classmethod
    def open(cls, folder: Path) -> _Saved:
        data = json.loads((folder / INDEX).read_text())
        if data.get("format") != FORMAT:
            raise InputError(f"{folder}: expected a {FORMAT!r}, got {data.get('format')!r}")
        return cls(folder, data["tensors"], data["groups"], {})

    def read(self, name: str, x: Tensor) -> None:
        """Fill a tensor, or this rank's part of one."""
        here = box_of(x)
        target = own(x, here)
        for file, start, size in self.tensors[name]["parts"]:
            there = Box(tuple(start), tuple(size))
            common = overlap(here, there)
            if common is not None:
                common.of(target, here).copy_(common.of(self.part(file, name), there))

    def part(self, file: str, name: str) -> Tensor:
        if file != os.path.basename(file):
            raise InputError(f"{self.folder}: expected files beside the index, got {file!r}")
        if file not in self.files:
            self.files[file] = safetensors.read(self.folder / file)
        return self.files[file][name]


# --- folders --------------------------------------------------------------------------------------


def _take_place(folder: Path) -> None:
    """The new state becomes the current one. At any moment one of the two is whole."""
    shutil.rmtree(folder / OLD, ignore_errors=True)
    if (folder / NOW).exists():
        os.rename(folder / NOW, folder / OLD)
    os.rename(folder / NEW, folder / NOW)
    shutil.rmtree(folder / OLD, ignore_errors=True)


def _last_good(path: Path) -> Path:
    for name in (NOW, OLD):
        if (path / name / INDEX).exists():
            return path / name
    raise InputError(f"load_state: expected a folder that save_state wrote, got {path}")


# --- ranks ----------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _gathered(mine: dict) -> list[dict]:
    if not dist.is_initialized():
        return [mine]
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every
