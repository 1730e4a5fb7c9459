"""Which hooks a model and its modules have, and which there are for all modules.

Dynamo writes a module's hooks into the program and does not guard on them: one that is set or removed later would be
ignored, or would run still. PyTorch numbers all hooks in order, so a call need only compare one number with the last
one it saw; the modules are looked at where that moved, or where there are hooks that may have been removed.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from tessera.torch_internals.modules import hooks_of, hooks_of_all_modules

Made = TypeVar("Made")
Signature = tuple[tuple[int, str, tuple[int, ...]], ...]


class ModuleHooks(Generic[Made]):
    """`Made` is what was compiled for the hooks that there were."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.seen = RemovableHandle.next_id  # the number of the next hook, when the modules were last looked at
        self.hooks = self.signature()
        self.some = bool(self.hooks)
        self.calls: dict[Signature, Made] = {}  # what was compiled for other hooks than the present ones

    def signature(self) -> Signature:
        held = [(id(m), hooks_of(m)) for m in self.module.modules()]
        return tuple(
            (place, kind, tuple(hooks))
            for place, kinds in (*held, (0, hooks_of_all_modules()))
            for kind, hooks in kinds.items()
            if hooks
        )

    def changed(self, call: Made) -> tuple[bool, Made | None]:
        """Whether the hooks are others than before, and what was compiled for them, if anything. `call` is what was
        compiled for those before."""
        self.seen = RemovableHandle.next_id
        hooks = self.signature()
        if hooks == self.hooks:
            return False, None
        self.calls[self.hooks] = call
        self.hooks, self.some = hooks, bool(hooks)
        return True, self.calls.pop(hooks, None)
