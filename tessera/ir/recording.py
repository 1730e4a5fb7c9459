"""What the parts of the recorder need of it: `record` imports them, and they know it by this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from tessera.ir.alias import Ref
from tessera.ir.builder import Builder
from tessera.ir.equation import Value
from tessera.torch_internals.operators import OpOverload


class Recording(Protocol):
    builder: Builder
    keep: Callable[[OpOverload], bool]
    refs: dict[int, Ref]
    alive: list[torch.Tensor]
    symbolic: bool

    def ref(self, tensor: torch.Tensor) -> Ref: ...
    def lower(self, tree: object) -> Any: ...
    def outcome(self, func: OpOverload, args: tuple, kwargs: dict) -> Any: ...
    def pure(self, func: OpOverload, args: tuple, kwargs: dict, out: object) -> object: ...
    def write_to(self, ref: Ref, new: Value, known: bool = False) -> None: ...
    def __enter__(self) -> object: ...
    def __exit__(self, *exc: object) -> None: ...
