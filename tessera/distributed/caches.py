"""Caches of keys and values among the arguments of a call, as Hugging Face's transformers have them.

In: a cache, an object with layers that hold tensors (`keys`, `values`, counters). Out: those tensors as further inputs
of a program, which writes them where they lie; and what a call leaves in a layer that was empty, as further results.
Keys and values are split over heads by axes that split the model, over rows by axes that split the batch; a layer holds
them as DTensors. Whatever else a call changes in a layer is a part of what the program is made for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tessera.distributed.dtensors import as_dtensor
from tessera.distributed.plan import DATA, MODEL, Plan
from tessera.distributed.weights import own_part, without_memory
from tessera.ir.placement import Placement
from tessera.torch_internals import pytree

NAME = "tessera cache "
HEADS = 4  # dimensions of keys and values: rows, heads, places, sizes
Slot = tuple[int, str]  # a layer, and the name of a tensor in it


def is_cache(x: object) -> bool:
    """It has layers that keep keys and values, and a method that adds some."""
    layers = getattr(x, "layers", None)
    return callable(getattr(x, "update", None)) and isinstance(layers, list) and all(map(_is_layer, layers))


def _is_layer(layer: object) -> bool:
    return hasattr(layer, "keys") and hasattr(layer, "values") and callable(getattr(layer, "update", None))


@dataclass(frozen=True)
class Left:
    """What a call leaves in caches beside what it writes there: new tensors, and other attributes."""

    slots: tuple[Slot, ...]
    attributes: tuple[dict[str, Any], ...]  # of each layer


class Caches:
    """The caches among the arguments of one call."""

    def __init__(self, leaves: Sequence[object]) -> None:
        self.objects = list({id(x): x for x in leaves if is_cache(x)}.values())
        self.layers = [layer for cache in self.objects for layer in cache.layers]  # type: ignore[attr-defined]
        self.slots = [(i, n) for i, layer in enumerate(self.layers) for n, x in vars(layer).items() if _is_tensor(x)]

    @property
    def tensors(self) -> list[Tensor]:
        return [vars(self.layers[i])[name] for i, name in self.slots]

    def key(self) -> tuple:
        """What differs between programs, beside the tensors."""
        return tuple((type(layer), *_plain(layer).items()) for layer in self.layers)

    def lay_out(self, plan: Plan, device_mesh: DeviceMesh) -> None:
        """Keys and values that were made before the first call are split as those that a call makes."""
        ranks = prod(plan.mesh.size(axis) for axis in plan.axes(*DATA))
        for i, name in self.slots:
            x = vars(self.layers[i])[name]
            if x.ndim == HEADS and not isinstance(x, DTensor):
                placement = lies(plan, (x.shape[0] * ranks, *x.shape[1:]))
                part = own_part(x, placement.with_split(0, ()), device_mesh)
                setattr(self.layers[i], name, as_dtensor(part, placement, device_mesh))

    # --- while a call is captured ---

    @contextmanager
    def holding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Layers hold other tensors meanwhile."""
        before = [dict(vars(layer)) for layer in self.layers]
        for (i, name), x in zip(self.slots, tensors, strict=True):
            setattr(self.layers[i], name, x)
        try:
            yield
        finally:
            for layer, attributes in zip(self.layers, before, strict=True):
                vars(layer).clear()
                vars(layer).update(attributes)

    def left(self, given: Sequence[Tensor]) -> tuple[list[Tensor], Left]:
        """New tensors that a call has put into layers, and where."""
        known = set(map(id, given))
        new = {(i, name): x for i, layer in enumerate(self.layers) for name, x in vars(layer).items()
               if _is_tensor(x) and id(x) not in known}  # fmt: skip
        return list(new.values()), Left(tuple(new), tuple(_plain(layer) for layer in self.layers))

    def named(self, out: object) -> object:
        """A result in which names stand for caches: another call gives other ones."""
        names = {id(x): f"{NAME}{i}" for i, x in enumerate(self.objects)}
        return pytree.tree_map(lambda x: names.get(id(x), x), out)

    # --- after a program ran ---

    def back(self, out: object) -> object:
        """A result with the caches of this call in the place of their names."""
        objects = {f"{NAME}{i}": x for i, x in enumerate(self.objects)}
        return pytree.tree_map(lambda x: objects.get(x, x) if isinstance(x, str) else x, out)

    def take(self, left: Left, tensors: Sequence[Tensor], places: Sequence[Placement], mesh: DeviceMesh) -> None:
        for (i, name), x, placement in zip(left.slots, tensors, places, strict=True):
            setattr(self.layers[i], name, as_dtensor(x, placement, mesh) if x.ndim == HEADS else x)
        for layer, attributes in zip(self.layers, left.attributes, strict=True):
            vars(layer).update(attributes)

    def leave(self, slots: Sequence[Slot]) -> None:
        """Give up the memory of what other stages of a pipeline hold."""
        for i, name in slots:
            setattr(self.layers[i], name, without_memory(vars(self.layers[i])[name]))


def lies(plan: Plan, shape: Sequence[Any]) -> Placement:
    """Where keys and values lie: rows over axes of data, heads over those of the model, as far as they divide them."""
    placement = Placement.whole(plan.mesh, tuple(shape))
    if len(shape) != HEADS:
        return placement
    for dim, axes in ((0, plan.axes(*DATA)), (1, plan.axes(*MODEL))):
        for axis in axes:
            finer = placement.with_axis(dim, axis)
            placement = finer if finer.is_even(dim) else placement
    return placement


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor)


def _plain(layer: object) -> dict[str, Any]:
    kinds = (bool, int, float, str, type(None), torch.dtype, torch.device)
    return {name: x for name, x in vars(layer).items() if isinstance(x, kinds)}
