"""What a dictionary of Python's holds: attributes of an object or a class, globals of a file, a function's variables.

In: the dictionary, and which names count. Out: `Names`, which tells whether they still hold what they held. Numbers,
switches and containers of such are compared by what they are, with their types; a function, a tensor, a module or any
other object by which one it is.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import is_, itemgetter

import torch
from torch import nn

from tessera.distributed.object_key import NUMBERS
from tessera.torch_internals.modules import HOOKS

INTERNAL = vars(nn.Module()).keys() - {"training", "_modules", *HOOKS}
PLAIN = (*NUMBERS, torch.dtype, torch.device, torch.Size, slice, range)
CONTAINERS = (list, tuple, set, frozenset)
MOST = 64  # elements of a list that are compared
MANY = 4096  # and of a dictionary
DEPTH = 6  # containers in containers


@dataclass(frozen=True, eq=False)
class Which:
    """Something that is compared by which it is."""

    x: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Which) and other.x is self.x

    def __hash__(self) -> int:
        return id(self.x)

    def __repr__(self) -> str:
        return getattr(self.x, "__name__", f"a {type(self.x).__name__}")


@dataclass(frozen=True)
class Plain:
    """Something that is compared by what it is; 1, 1.0 and True differ."""

    kinds: tuple[type, ...]
    shown: str

    def __repr__(self) -> str:
        return self.shown


@dataclass(frozen=True)
class Within:
    """A container, by what is in it."""

    kind: type
    parts: tuple

    def __repr__(self) -> str:
        if issubclass(self.kind, dict):
            return f"{{{', '.join(f'{n!r}: {x!r}' for n, x in self.parts)}}}"
        return f"{self.kind.__name__}({', '.join(map(repr, self.parts))})"


def said(x: object, depth: int = DEPTH) -> object:
    """Equal for what says the same."""
    if isinstance(x, PLAIN):
        return Plain((type(x),), repr(x))
    if isinstance(x, dict) and len(x) <= MANY and depth:
        return Within(type(x), tuple((said(n, 0), said(v, depth - 1)) for n, v in list(x.items())))
    if isinstance(x, CONTAINERS) and len(x) <= MOST and depth:
        if all(isinstance(v, PLAIN) for v in x):
            return Plain((type(x), *map(type, x)), repr(x))
        return Within(type(x), tuple(said(v, depth - 1) for v in x))
    return Which(x)


class Names:
    """`read`: the names that count; None where all do but those of PyTorch's own."""

    def __init__(self, where: str, held: Mapping, read: Collection[str] | None = None) -> None:
        self.where, self.held, self.read = where, held, None if read is None else sorted(read)
        self.told = self.tell()
        self.keep()

    def tell(self) -> dict[str, object]:
        held, read = self.held, self.read
        names = [n for n in held if n not in INTERNAL] if read is None else [n for n in read if n in held]
        return {n: said(held[n]) for n in names}

    def keep(self) -> None:
        """The objects that are there say what was told."""
        names = list(self.told)
        self.size = len(self.held)
        self.get = itemgetter(*names, names[0]) if names else None  # twice, so that it gives a tuple of any number
        self.objects = self.get(self.held) if self.get else ()

    def same_objects(self) -> bool:
        """The very objects that were there; what they hold is another question."""
        try:
            same = self.get is None or all(map(is_, self.get(self.held), self.objects))
        except KeyError:
            return False
        return same and len(self.held) == self.size

    def holds(self) -> bool:
        """Other objects may say the same."""
        if self.tell() != self.told:
            return False
        self.keep()
        return True

    def differs(self) -> str:
        """The first name that holds something else by now."""
        before, now = self.told, self.tell()
        changed = next((n for n in (*before, *now) if n not in before or n not in now or before[n] != now[n]), "")
        told = [f"{x[changed]!r}"[:60] if changed in x else "nothing" for x in (before, now)]
        return f"{self.where}.{changed} was {told[0]}, is {told[1]}"

    def rebound(self) -> bool:
        """Does a name that was there say another number?"""
        now = self.tell()
        changed = [(x, now[n]) for n, x in self.told.items() if n in now and now[n] != x]
        return any(not isinstance(x, Which) for pair in changed for x in pair)


def of_class(kind: type) -> dict:
    """The dictionary itself, whose version shows that it changed; it is not to be written."""
    (held,) = gc.get_referents(vars(kind))
    return held


class Cell(dict):
    """A variable of an outer function, as a dictionary of its name."""

    def __init__(self, name: str, cell: types.CellType) -> None:
        super().__init__({name: None})
        self.cell = cell

    def __getitem__(self, _: str) -> object:
        return contents(self.cell)


def contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was bound to it yet
        return None


class Slots(dict):
    """The attributes of an object that has no dictionary."""

    def __init__(self, x: object, names: Collection[str]) -> None:
        super().__init__(dict.fromkeys(names))
        self.x = x

    def __getitem__(self, name: str) -> object:
        return getattr(self.x, name, None)
