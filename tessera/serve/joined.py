"""Linear layers that read the same tensor, as one product: query, key and value; gate and up.

In: a model, and one call of it to see who reads what. Out: groups of its layers by name, and `join`, which puts a
`Part` in the place of each. Where few rows meet a weight, three products in a row take nearly three times as long as
one.

The weights of a group lie in one piece of memory afterwards, and those that the layers had are views of it: nothing is
held twice, and whoever else has the model sees the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.torch_internals.autograd import version_of
from tessera.torch_internals.modules import hooks_of


def pays(device: torch.device) -> bool:
    """Not on a CPU: one weight after another costs it no more, and more of what follows goes into its kernels."""
    return device.type == "cuda"


class Whole(nn.Module):
    """The layers of a group, one below the other."""

    bias: nn.Parameter | None

    def __init__(self, layers: list[nn.Linear]):
        super().__init__()
        for name in ("weight", "bias"):
            given = [p for p in (getattr(layer, name) for layer in layers) if p is not None]
            whole = torch.cat([p.detach() for p in given]) if given else None
            self.register_parameter(name, None if whole is None else nn.Parameter(whole, requires_grad=False))
            start = 0
            for p in given:
                p.data = whole[start : start + len(p)]  # type: ignore[index]
                start += len(p)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Part(nn.Module):
    """One of the layers. Each computes the whole: the compiler computes it once."""

    def __init__(self, whole: Whole, start: int, end: int):
        super().__init__()
        self.whole, self.start, self.end = whole, start, end

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)[..., self.start : self.end]


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[list[list[str]]]:
    """While the model runs once: the names of layers that read the same tensor, group by group; complete afterwards."""
    groups: list[list[str]] = []
    readers: list[tuple[Tensor, int, list[nn.Linear]]] = []  # a tensor, its version, and who read it

    def see(layer: nn.Linear, args: tuple[Tensor, ...]) -> None:
        for x, version, layers in readers:
            if x is args[0] and version_of(x) == version:
                layers.append(layer)
                return
        readers.append((args[0], version_of(args[0]), [layer]))

    linear = {m: name for name, m in model.named_modules() if type(m) is nn.Linear}
    handles = [layer.register_forward_pre_hook(see) for layer in linear]
    try:
        yield groups
    finally:
        for handle in handles:
            handle.remove()
    calls = [layer for _, _, layers in readers for layer in layers]
    used = [p for m in model.modules() for p in m._parameters.values()]
    for _, _, layers in readers:
        once = all(calls.count(x) == 1 and sum(p is x.weight for p in used) == 1 for x in layers)
        if len(layers) > 1 and once and _alike(layers):
            groups.append([linear[layer] for layer in layers])


def _alike(layers: list[nn.Linear]) -> bool:
    kinds = {(x.weight.dtype, x.weight.device, type(x.weight), x.weight.shape[1], x.bias is None) for x in layers}
    plain = not any(any(hooks_of(x).values()) for x in layers)
    return len(kinds) == 1 and type(layers[0].weight) is nn.Parameter and plain


def join(model: nn.Module, groups: list[list[str]]) -> bool:
    """Put parts in the place of layers, but for those that have been replaced meanwhile. Were there any?"""
    any_left = False
    for names in groups:
        layers = [model.get_submodule(name) for name in names]
        if all(type(layer) is nn.Linear for layer in layers):
            any_left, whole, start = True, Whole(layers), 0  # type: ignore[arg-type]
            for name, layer in zip(names, layers, strict=True):
                owner, _, own = name.rpartition(".")
                setattr(model.get_submodule(owner), own, Part(whole, start, start + len(layer.weight)))  # type: ignore[arg-type]
                start += len(layer.weight)  # type: ignore[arg-type]
    return any_left
