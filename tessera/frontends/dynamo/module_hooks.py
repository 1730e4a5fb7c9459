"""Which hooks a model and its modules have, and which there are for all modules.

Dynamo writes a module's hooks into the program and does not guard on them: one that is set or removed later would be
ignored, or would run still. PyTorch numbers all hooks in order, so a call need only compare one number with the last
one it saw; the modules are looked at where that moved, or where there are hooks that may have been removed.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch.nn.modules import module as every_module
from torch.utils.hooks import RemovableHandle

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_EVERYWHERE = tuple(f"_global{kind}" for kind in _KINDS)  # those of PyTorch's register_module_forward_hook and its like

Made = TypeVar("Made")
Signature = tuple[tuple[int, str, tuple[int, ...]], ...]


class ModuleHooks(Generic[Made]):
    """`Made` is what was compiled for the hooks that there were."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.seen = RemovableHandle.next_id  # the number of the next hook, when the modules were last looked at
        self.found = self.signature()
        self.some = bool(self.found)
        self.calls: dict[Signature, Made] = {}  # what was compiled for other hooks than the present ones

    def signature(self) -> Signature:
        places = [(m, _KINDS) for m in self.module.modules()]
        return tuple(
            (id(place), kind, tuple(hooks))
            for place, kinds in (*places, (every_module, _EVERYWHERE))
            for kind in kinds
            if (hooks := getattr(place, kind, None))
        )

    def changed(self, call: Made) -> tuple[bool, Made | None]:
        """Whether the hooks are others than before, and what was compiled for them, if anything. `call` is what was
        compiled for those before."""
        self.seen = RemovableHandle.next_id
        found = self.signature()
        if found == self.found:
            return False, None
        self.calls[self.found] = call
        self.found, self.some = found, bool(found)
        return True, self.calls.pop(found, None)
