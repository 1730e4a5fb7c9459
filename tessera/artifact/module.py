"""An artifact as an `nn.Module` over PyTorch's operators, which whoever takes modules can export again.

In: a file. Out: a module that holds the file's weights and runs its portable program: no kernels of the file, and no
look at addresses, so that it can be traced.
"""

from __future__ import annotations

import os

import torch

from tessera.artifact.compile import unguarded
from tessera.artifact.loaded import Entry, load
from tessera.artifact.structure import unflatten
from tessera.util.errors import InputError


class PortableModule(torch.nn.Module):
    def __init__(self, path: str | os.PathLike, name: str | None = None) -> None:
        super().__init__()
        entries = load(path, device="cpu", trust=False, compile=False).entries
        if name is None and len(entries) > 1:
            raise InputError(f"expected one of the entries {', '.join(entries)}: m.entries['…']")
        self.entry: Entry = entries[name or next(iter(entries))]
        self.run = unguarded(self.entry.program)
        self.names = [v.name for v in self.entry.program.trace.inputs[: len(self.entry.held)]]
        for held, tensor in zip(self.names, self.entry.held, strict=True):
            self.register_buffer(held, tensor)

    def forward(self, /, *args: object, **kwargs: object) -> object:
        out = self.run(*(getattr(self, name) for name in self.names), *self.entry.arguments.flat(args, kwargs))
        return out[0] if self.entry.out == ["leaf"] else unflatten(iter(out), self.entry.out)
