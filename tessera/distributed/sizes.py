"""Sizes that change from call to call: one program serves all of them.

In: the arguments of calls. Out: for a call whose sizes differ from those of an earlier one, its arguments with symbols
for those sizes; and for which sizes a program that was captured with them holds. A symbol is the size of this rank's
part. The whole is so many times that, so every axis divides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tessera.ir.types import symbol_of
from tessera.torch_internals import pytree
from tessera.torch_internals.fake import FakeTensorMode
from tessera.torch_internals.shapes import ShapeEnv, guards_hold, guards_of, symbolic_fake
from tessera.util.errors import CaptureError, InputError, OptionError, RuleError

Program = TypeVar("Program")
# What a program with symbols may run into; with numbers for its sizes it is tried again.
SYMBOLS_REFUSED = (CaptureError, InputError, OptionError, RuleError)
Shapes = tuple[tuple[int, ...], ...]  # of the tensors among the arguments


def shapes_of(leaves: Sequence[object]) -> Shapes:
    return tuple(tuple(x.shape) for x in leaves if isinstance(x, Tensor))


@dataclass(frozen=True)
class SymbolicArguments:
    """Arguments of which some sizes are symbols."""

    leaves: list
    env: ShapeEnv

    def like(self, batch: tuple, named: dict) -> tuple[tuple, dict]:
        """The arguments with these in their places."""
        return pytree.tree_unflatten(self.leaves, pytree.tree_flatten((batch, named))[1])

    def fits(self) -> Fits:
        """Asked when everything is captured."""
        tensors = [x for x in self.leaves if isinstance(x, Tensor)]
        pairs = [(i, d) for i, x in enumerate(tensors) for d, n in enumerate(x.shape) if isinstance(n, torch.SymInt)]
        sizes = [tensors[i].shape[d] for i, d in pairs]
        numbers = tuple(tuple(None if isinstance(n, torch.SymInt) else n for n in x.shape) for x in tensors)
        places: dict[str, list[tuple[int, int]]] = {}
        for (i, d), size in zip(pairs, sizes, strict=True):
            # empty where the program found out what it must be, and the guards say so
            if symbol := symbol_of(size):  # type: ignore[arg-type]
                places.setdefault(symbol, []).append((i, d))
        return Fits(self.env, guards_of(self.env, sizes), tuple(pairs), tuple(map(tuple, places.values())), numbers)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Fits:
    """For which sizes a program holds."""

    env: ShapeEnv
    guards: str
    symbols: tuple[tuple[int, int], ...]  # (tensor, dimension) of each size that is a symbol
    equal: tuple[tuple[tuple[int, int], ...], ...]  # of each symbol, all its places
    numbers: tuple[tuple[int | None, ...], ...]  # the other sizes of each tensor

    def holds(self, shapes: Shapes) -> bool:
        pairs = zip(self.numbers, shapes, strict=True)
        if any(n is not None and n != m for own, given in pairs for n, m in zip(own, given, strict=True)):
            return False
        if any(len({shapes[i][d] for i, d in places}) > 1 for places in self.equal):
            return False
        sizes = [shapes[i][d] for i, d in self.symbols]
        return min(sizes) > 1 and guards_hold(self.env, self.guards, sizes)


class Sizes(Generic[Program]):
    """The sizes that calls of one kind have had, and the programs that serve several."""

    def __init__(self) -> None:
        self.seen: dict[tuple, list[Shapes]] = {}
        self.programs: dict[tuple, list[tuple[Fits, Program]]] = {}
        self.given_up: dict[tuple, str] = {}  # kinds of calls whose sizes must be numbers, and why

    def known(self, kind: tuple, leaves: Sequence[object]) -> Program | None:
        """A program that was made for other sizes, and serves these."""
        shapes = shapes_of(leaves)
        return next((program for fits, program in self.programs.get(kind, ()) if fits.holds(shapes)), None)

    def symbolic_arguments(self, kind: tuple, leaves: Sequence[object]) -> SymbolicArguments | None:
        """The arguments with symbols for those sizes that were others before; None where there are none."""
        shapes, before = shapes_of(leaves), self.seen.setdefault(kind, [])
        changed = [tuple(any(old[i][d] != n for old in before) and n > 1 for d, n in enumerate(shape))
                   for i, shape in enumerate(shapes)]  # fmt: skip
        before.append(shapes)
        if not any(map(any, changed)) or kind in self.given_up or any(isinstance(x, DTensor) for x in leaves):
            return None
        env = ShapeEnv()
        mode, dynamic = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env), iter(changed)
        return SymbolicArguments([_symbolic(mode, x, next(dynamic), i) if isinstance(x, Tensor) else x
                         for i, x in enumerate(leaves)], env)  # fmt: skip

    def keep(self, kind: tuple, fits: Fits, program: Program) -> None:
        self.programs.setdefault(kind, []).append((fits, program))

    def give_up(self, kind: tuple, error: Exception) -> str:
        self.given_up[kind] = f"sizes that change stay numbers: {str(error).splitlines()[0]}"
        return self.given_up[kind]


def _symbolic(mode: FakeTensorMode, x: Tensor, dynamic: Sequence[bool], place: int) -> Any:
    alone = x.detach()
    if not any(dynamic):
        return mode.from_tensor(alone, static_shapes=True)
    return symbolic_fake(mode, alone, list(dynamic), f"argument_{place}")
