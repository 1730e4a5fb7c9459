"""`save_state`, `load_state`: a model and its optimizer on the disk, from any mesh to any other.

    index.json           what there is: whole sizes by the model's own names, and which box is in which file
    rank_0.safetensors   the parts that a rank wrote, and where they begin

In: a model, sharded or not, and an optimizer. Out: files of plain data. Each part is written once, by the first of the
ranks that hold it. Who loads reads the boxes that overlap its own, so strategy, mesh and number of ranks are free. A
save goes to a folder of its own and takes the place of the last one when all ranks have written; one that is
interrupted leaves the last good one. What others wrote is read too: plain safetensors, and checkpoints of
torch.distributed.checkpoint, whose own reader of safetensors reads these files.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.distributed import safetensors, saving
from tessera.distributed.boxes import Box, box_of, own, writes
from tessera.distributed.compare import everyones, on_all
from tessera.distributed.dcp import METADATA, of_dcp
from tessera.distributed.matching import find, names_of
from tessera.distributed.optimizer_slots import groups_of, load_groups, slots_of
from tessera.distributed.saved import FORMAT, INDEX, Saved, of_index, of_safetensors, starts_noted
from tessera.distributed.saving import Saving
from tessera.distributed.sharding import pipeline_axis
from tessera.distributed.users_line import at_users_line
from tessera.distributed.weights import whole_of
from tessera.util.errors import InputError

NEW, NOW, OLD, PLAIN = ".new", "state", ".old", ".safetensors"


@at_users_line
def save_state(
    path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, wait: bool = True
) -> Saving:
    """Write a model's state, and its optimizer's, into the folder `path`. All ranks call it.

    path   a folder; or a file that ends in .safetensors, for the model's whole tensors alone
    wait   False: give back a `Saving` as soon as tensors are copied to the host; they are written while training goes
           on, and `.wait()` returns when they are on the disk
    """
    saving.finish_last()
    if dist.is_initialized() and dist.get_backend() == "fake" and dist.get_world_size() > 1:
        raise InputError(f"save_state: expected ranks that are there, got a fake group of {dist.get_world_size()}")
    save = _Plain(Path(path), model, optimizer) if Path(path).suffix == PLAIN else _Save(Path(path), model, optimizer)
    if not wait:
        save.keep()
        return saving.begin(save.write)
    save.write(None)
    return Saving()


class _Save:
    """What this rank writes of a state."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.folder, self.file = folder, f"rank_{_rank()}{PLAIN}"
        everything, apart = _tensors(model, optimizer), pipeline_axis(model)
        boxes = {n: box for n, x in everything.items() if writes(x, apart) and not (box := box_of(x)).is_empty}
        self.boxes: dict[str, Box] = boxes
        self.parts = {name: own(everything[name], box) for name, box in boxes.items()}
        every = everyones({name: [self.file, list(box.start), list(box.size)] for name, box in boxes.items()})
        rows = {name: _row(x, [parts[name] for parts in every if name in parts]) for name, x in everything.items()}
        groups = [] if optimizer is None else groups_of(model, optimizer)
        self.index = {"format": FORMAT, "tensors": rows, "groups": groups}

    def keep(self) -> None:
        """Copies on the host, which training does not change."""
        self.parts = {name: x.detach().to("cpu", copy=True) for name, x in self.parts.items()}

    def write(self, group: dist.ProcessGroup | None) -> None:
        for step in (self.make_room, self.write_parts, self.publish):
            on_all("save_state", step, group)

    def make_room(self) -> None:
        if _rank() == 0:
            shutil.rmtree(self.folder / NEW, ignore_errors=True)
            (self.folder / NEW).mkdir(parents=True)

    def write_parts(self) -> None:
        safetensors.write(self.folder / NEW / self.file, self.parts, starts_noted(self.boxes))

    def publish(self) -> None:
        if _rank() == 0:
            (self.folder / NEW / INDEX).write_text(json.dumps(self.index))
            _take_place(self.folder)


class _Plain(_Save):
    """The model's whole tensors, in one file that rank 0 writes."""

    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None:
            raise InputError(f"save_state: expected no optimizer beside a plain file of weights, got one for {path}")
        if pipeline_axis(model) is not None:
            raise InputError(f"save_state: no rank of a pipeline has all weights; expected a folder, got {path}")
        self.path, self.parts = path, dict[str, Tensor]()
        for name, x in _tensors(model, None).items():
            whole = whole_of(x.detach())
            if _rank() == 0:
                self.parts[name] = whole.cpu()

    def write(self, group: dist.ProcessGroup | None) -> None:
        on_all("save_state", self.write_parts, group)

    def write_parts(self) -> None:
        if _rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_name(f"{self.path.name}{NEW}")
            safetensors.write(new, self.parts)
            os.replace(new, self.path)


def _row(x: Tensor, parts: list) -> dict:
    return {"shape": list(x.shape), "dtype": safetensors.CODES.get(x.dtype, str(x.dtype)), "parts": parts}


@at_users_line
def load_state(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read a state into a model and its optimizer, in place. All ranks call it.

    path   what `save_state` wrote; a safetensors file, or a folder of them (also with model.safetensors.index.json);
           or a folder that torch.distributed.checkpoint wrote
    """
    saving.finish_last()
    on_all("load_state", lambda: _load(Path(path), model, optimizer))


def _load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    state = find(_opened(path), model, optimizer)
    weights = _tensors(model, None)
    with torch.no_grad():
        for name, kept in state.weights.items():
            kept.read_into(weights[name], name)
        if optimizer is not None:
            load_groups(model, optimizer, state.groups)
            shapes = {name: kept.shape for name, kept in state.slots.items()}
            slots = slots_of(model, optimizer, shapes)
            for name, kept in state.slots.items():
                kept.read_into(slots[name], name)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Everything that is kept, by name: weights and buffers as the model calls them, then the optimizer's."""
    every = dict[str, Tensor]((*model.named_parameters(), *model.named_buffers()))
    named = {name: every[name] for name in names_of(model)}
    return named if optimizer is None else {**named, **slots_of(model, optimizer)}


# --- folders --------------------------------------------------------------------------------------


def _take_place(folder: Path) -> None:
    """The new state becomes the current one. At any moment one of the two is whole."""
    shutil.rmtree(folder / OLD, ignore_errors=True)
    if (folder / NOW).exists():
        os.rename(folder / NOW, folder / OLD)
    os.rename(folder / NEW, folder / NOW)
    shutil.rmtree(folder / OLD, ignore_errors=True)


def _opened(path: Path) -> Saved:
    """A checkpoint, whoever wrote it."""
    for folder in (path / NOW, path / OLD, path):
        if (folder / INDEX).exists():
            return of_index(folder)
    if (path / METADATA).exists():
        return of_dcp(path)
    if (path.is_file() and path.suffix == PLAIN) or any(path.glob(f"*{PLAIN}")):
        return of_safetensors(path)
    raise InputError(
        "load_state: expected a folder that save_state or torch.distributed.checkpoint wrote, or safetensors, "
        f"got {path}"
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
