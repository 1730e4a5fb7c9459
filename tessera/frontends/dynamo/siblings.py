"""Which modules of a model equal another one of it.

In: a model. Out: for each module that equals others, the first of these; and why a block that looks like one is none.
Modules of one class are compared, from the outside in. What is in a module that equals another is not looked at.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn

from tessera.frontends.dynamo.equal_modules import match

_LISTS = (nn.ModuleList, nn.ModuleDict)  # which nobody calls
_KINDS = 8  # a block is compared with so many of its class


@dataclass
class Siblings:
    """The equal modules of all models that were looked into."""

    firsts: dict[int, nn.Module] = field(default_factory=dict)  # by the id of a module: the first that equals it
    notes: dict[str, str] = field(default_factory=dict)  # the path of a block that equals none -> why
    seen: set[int] = field(default_factory=set)
    kept: list[nn.Module] = field(default_factory=list)  # what is named by its id

    def look_into(self, model: nn.Module) -> None:
        kinds: dict[type, list[tuple[str, nn.Module]]] = {}
        owners = Counter(id(t) for m in model.modules() for t in _tensors(m))
        self.kept.append(model)
        self.seen.add(id(model))

        def walk(parent: nn.Module, path: str) -> None:
            for name, child in parent.named_children():
                if id(child) in self.seen or not any(True for _ in child.children()):
                    continue
                self.seen.add(id(child))
                place = f"{path}.{name}" if path else name
                if isinstance(child, _LISTS) or not self._equals(place, child, parent, kinds, owners):
                    walk(child, place)

        walk(model, "")

    def _equals(self, place: str, child: nn.Module, parent: nn.Module, kinds: dict, owners: Counter) -> bool:
        others = kinds.setdefault(type(child), [])
        reason = ""
        for path, first in others:
            compared = match(first, child)
            if not compared.differences:
                if all(owners[id(t)] == 1 for t in compared.tensors.values()):
                    self.firsts[id(first)] = self.firsts[id(child)] = first
                    return True
                reason = "another module has one of its tensors too"
                break
            reason = reason or f"it is not equal to {path}: {compared.differences[0]}"
        if reason and isinstance(parent, (*_LISTS, nn.Sequential)) and not type(child).__module__.startswith("torch."):
            self.notes.setdefault(place, reason)
        if len(others) < _KINDS:
            others.append((place, child))
        return False


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    """The module's own. One under two names is two."""
    held = (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values())
    return [t for t in held if isinstance(t, torch.Tensor)]
