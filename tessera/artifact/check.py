"""Arguments of a loaded entry: by position or name, checked, flat.

In: what the manifest says of an entry's arguments. Out: a function from a call's arguments to the leaves that its
program takes. Structure is compared here, and what the leaves are by `frontends/arguments.py`, as for every exported
program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tessera.artifact.structure import Structure, check_structure, flatten
from tessera.frontends.arguments import Arguments as Leaves
from tessera.frontends.arguments import Leaf, Range, SizeLeaf, TensorLeaf, ValueLeaf, symbols_of
from tessera.ir.formula import SYMBOL, Formula, Formulas
from tessera.ir.serial_check import is_name
from tessera.util.errors import ArtifactError, InputError, Unserial


@dataclass(frozen=True)
class Arguments:
    """How an entry is called."""

    structure: Structure
    parameters: tuple[str, ...]
    leaves: Leaves

    def flat(self, args: tuple, kwargs: dict) -> list[object]:
        args, kwargs = self._bound(args, kwargs)
        return self.leaves(flatten((args, kwargs), self.structure, "arguments"))

    @property
    def count(self) -> int:
        return len(self.leaves.leaves)

    def lines(self) -> list[str]:
        """What each has to be, for people."""
        return self.leaves.lines()

    def sizes(self) -> list[str]:
        """Sizes that may change, for people."""
        bounds = self.leaves.ranges.items()
        return [f"{name} {low}..{'' if high is None else high}" for name, (low, high) in bounds]

    def _bound(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Positional arguments that came by name, in their places. Not the other way around: a file knows the names of
        the others, not where they stand in the function."""
        wanted, named = len(self.structure[1][0][1]), self.structure[1][1][1]
        if len(args) == wanted and len(kwargs) == len(named):
            return args, kwargs
        kwargs, args = dict(kwargs), tuple(args)
        for name in self.parameters[len(args) : wanted]:
            if name not in kwargs:
                raise InputError(f"expected the argument {name!r}; there are {self._signature()}")
            args = (*args, kwargs.pop(name))
        if len(args) > wanted or set(kwargs) != set(named):
            raise InputError(f"expected {self._signature()}, got {len(args)} and {', '.join(kwargs) or 'no names'}")
        return args, kwargs

    def _signature(self) -> str:
        named = (f"{name}=" for name in self.structure[1][1][1])
        return ", ".join((*self.parameters, *named)) or "no arguments"


def arguments_of(entry: dict, device: Callable[[str], torch.device], where: str) -> Arguments:
    """As the manifest says; `device` maps the devices that it names to those that are used."""
    structure, inputs, parameters = entry.get("in"), entry.get("inputs"), entry.get("parameters")
    count = check_structure(structure, f"{where}.in")
    match structure:
        case ["tuple", [["tuple", list(positional)], ["dict", list(), list()]]]:
            pass
        case _:
            raise ArtifactError(f"{where}.in: expected positional and named arguments")
    if not isinstance(parameters, list) or not all(map(is_name, parameters)) or len(parameters) > len(positional):
        raise ArtifactError(f"{where}.parameters: expected the names of {len(positional)} arguments")
    if not isinstance(inputs, list) or len(inputs) != count:
        raise ArtifactError(f"{where}.inputs: expected {count} leaves")
    ranges = _ranges(entry.get("sizes"), where)
    names = _names(entry.get("names", {}), ranges, where)
    leaves = [_leaf(row, ranges, device, f"{where}.inputs[{i}]") for i, row in enumerate(inputs)]
    if unknown := set(ranges) - symbols_of(leaves):
        raise ArtifactError(f"{where}.sizes: no argument has the size {sorted(unknown)[0]}")
    assert isinstance(structure, list)
    return Arguments(structure, tuple(parameters), Leaves(leaves, ranges, names, gradients=False))


def _ranges(sizes: object, where: str) -> dict[str, Range]:
    if not isinstance(sizes, dict):
        raise ArtifactError(f"{where}.sizes: expected sizes and their ranges")
    ranges: dict[str, Range] = {}
    for symbol, bounds in sizes.items():
        match bounds:
            case [int(low), (None | int()) as high] if SYMBOL.fullmatch(symbol):
                ranges[symbol] = (low, high)
            case _:
                raise ArtifactError(f"{where}.sizes[{symbol[:40]}]: expected the least and the most")
    return ranges


def _names(names: object, ranges: dict[str, Range], where: str) -> dict[str, str]:
    """What people call the sizes: plain names, no two the same."""
    if not isinstance(names, dict) or not all(s in ranges and is_name(name) for s, name in names.items()):
        raise ArtifactError(f"{where}.names: expected plain names of sizes, got {str(names)[:80]}")
    if len({names.get(symbol, symbol) for symbol in ranges}) != len(ranges):
        raise ArtifactError(f"{where}.names: expected a name of its own for every size, got {str(names)[:80]}")
    return names


def _leaf(row: Any, ranges: dict, device: Callable[[str], torch.device], where: str) -> Leaf:
    try:
        match row:
            case {"name": str(name), "dtype": str(dtype), "device": str(place), "shape": list(), "stride": list()}:
                kind = getattr(torch, dtype, None)
                shape, stride = (tuple(map(Formulas(ranges).read, row[k])) for k in ("shape", "stride"))
                if is_name(name) and isinstance(kind, torch.dtype) and len(shape) == len(stride):
                    return TensorLeaf(name, kind, device(place), shape, stride, bool(row.get("written")))
            case {"name": str(name), "symbol": str(symbol)} if is_name(name) and symbol in ranges:
                return SizeLeaf(name, Formula(symbol))
            case {"name": str(name), "value": None | bool() | int() | float() | str()} if is_name(name):
                return ValueLeaf(name, row["value"])
    except (Unserial, RuntimeError) as error:
        raise ArtifactError(f"{where}: {error}") from None
    raise ArtifactError(f"{where}: expected an argument, got {str(row)[:80]}")
