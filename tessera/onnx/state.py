"""Initializers as a module's parameters and buffers, under the names of the file.

In: the values of a graph's initializers. Out: parameters, where floats may be trained, and buffers. A name with dots
becomes modules in modules, so that `state_dict` has the names of the file, which are often those of the PyTorch model.
"""

from __future__ import annotations

import torch

from tessera.frontends.onnx.elements import FLOAT8_DTYPES, Narrow
from tessera.frontends.onnx.structure import Graph, Node

# Inputs that are no weights, though they are floats: statistics, scales, bounds.
_FIXED = {
    "BatchNormalization": (3, 4),
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "Resize": (1, 2),
    "Upsample": (1,),
    "Clip": (1, 2),
    "Pad": (2,),
    "Dropout": (1,),
    "Range": (0, 1, 2),
    "OneHot": (2,),
}


class State:
    def __init__(self, module: torch.nn.Module, graph: Graph) -> None:
        self.places: dict[str, tuple[torch.nn.Module, str]] = {}
        self.others: dict[str, object] = {}  # strings, sequences: what no module holds
        self.codes: dict[str, int] = {}  # of narrow types
        fixed = _fixed(graph.nodes)
        for name, value in graph.initializers.items():
            self.add(module, name, value, name not in fixed)

    def add(self, module: torch.nn.Module, name: str, value: object, trained: bool) -> None:
        if isinstance(value, Narrow):
            self.codes[name], value = value.code, value.data
        if not isinstance(value, torch.Tensor):
            self.others[name] = value
            return
        owner, attribute = _place(module, name)
        floats = value.is_floating_point() and value.dtype not in FLOAT8_DTYPES and name not in self.codes
        if floats and value.ndim and trained:
            owner.register_parameter(attribute, torch.nn.Parameter(value))
        else:
            owner.register_buffer(attribute, value)
        self.places[name] = owner, attribute

    def __contains__(self, name: str) -> bool:
        return name in self.places or name in self.others

    def __getitem__(self, name: str) -> object:
        if name in self.others:
            return self.others[name]
        owner, attribute = self.places[name]
        value = getattr(owner, attribute)
        return Narrow(value, self.codes[name]) if name in self.codes else value

    def known(self, name: str) -> bool:
        """Small, and nobody trains it: what it holds may decide a size, and is fixed when a program is made."""
        if name in self.others:
            return True
        owner, attribute = self.places[name]
        value = getattr(owner, attribute)
        if isinstance(value, torch.nn.Parameter):
            return False
        return value.numel() <= 1 or (not value.is_floating_point() and value.numel() <= 256)

    def device(self) -> torch.device | None:
        for owner, attribute in self.places.values():
            return getattr(owner, attribute).device
        return None


def _fixed(nodes: tuple[Node, ...]) -> set[str]:
    return {name for node in nodes for place in _FIXED.get(node.op, ()) for name in node.inputs[place : place + 1]}


def _place(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The module that holds this name, made if need be; a name that is none, or that another hides, is written flat."""
    *path, last = name.split(".")
    owner = module
    if all(path) and last:
        for part in path:
            inner = getattr(owner, part, None)
            if inner is None:
                inner = torch.nn.Module()
                owner.add_module(part, inner)
            elif not isinstance(inner, torch.nn.Module):
                break  # another value, or a method, has this name
            owner = inner
        else:
            if not hasattr(owner, last):
                return owner, last
    flat, count = name.replace(".", "_") or "_", 0
    while hasattr(module, flat):
        count += 1
        flat = f"{name.replace('.', '_')}_{count}"
    return module, flat
