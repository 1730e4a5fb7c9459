"""Ranks compare what they have, as plain data; a group that is not there is not asked.

They meet in groups of their own: where one rank compares and others compute, no message is taken for another's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import ClassVar

import torch.distributed as dist
from torch import nn

from tessera.distributed import watch
from tessera.distributed.deadlines import deadline
from tessera.torch_internals.distributed import set_deadline
from tessera.util.errors import MeshError


def everyones(mine: object, group: dist.ProcessGroup | None = None) -> list:
    """What each rank has; only this rank's own where no other is there."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return [mine]
    every: list = [None] * dist.get_world_size()
    with watch.waiting("ranks did not meet to compare what they have"):
        dist.all_gather_object(every, mine, group=group or own_group("compare"))
    return every


class _Groups:
    """Of the present process group, the groups that serve one purpose."""

    world: object = None
    named: ClassVar[dict[str, dist.ProcessGroup]] = {}


def own_group(purpose: str) -> dist.ProcessGroup | None:
    """A group of all ranks that nothing else uses. All ranks ask for it in the same order."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    world = dist.group.WORLD
    if _Groups.world is not world:
        _Groups.world, _Groups.named = world, {}
    if purpose not in _Groups.named:
        _Groups.named[purpose] = dist.new_group(backend="gloo", timeout=deadline())  # type: ignore[assignment]
    set_deadline(deadline(), _Groups.named[purpose])  # a later mesh may have brought another
    return _Groups.named[purpose]


def on_all(what: str, step: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Run a step on every rank and wait for all of them. Where it fails on one, it fails on all, which say on whom."""
    failure: Exception | None = None
    try:
        step()
    except Exception as error:
        failure = error
    every = everyones(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    for rank, told in enumerate(every):
        if told is not None:
            raise MeshError(f"{what}: rank {rank} failed: {told}")


def first_difference(every: list[list], what: str) -> None:
    """Raise where a rank's list is not rank 0's, with the first entries that differ."""
    for rank, other in enumerate(every):
        pairs = itertools.zip_longest(every[0], other, fillvalue="nothing more")
        differing = [(a, b) for a, b in pairs if a != b]
        if differing:
            a, b = next((pair for pair in differing if len({*map(_equation, pair)}) > 1), differing[0])
            raise MeshError(f"rank {rank} has another {what} than rank 0: it has {b!r}, rank 0 {a!r}")


def _equation(line: str) -> str:
    """Of a line of a program: not where it was written, nor what inputs are called."""
    return "" if line.startswith("def ") else line.partition("#")[0]


def agree_on_weights(model: nn.Module) -> None:
    """All ranks have weights of the same names, sizes and dtypes."""
    named = (*model.named_parameters(), *model.named_buffers())
    first_difference(everyones([f"{name}: {x.dtype} {list(x.shape)}" for name, x in named]), "model")
