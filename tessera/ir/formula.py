"""Symbolic sizes without SymPy: formulas over named sizes, as stored programs hold them.

In: a size as `serial_size` writes it, an int or `["size", tree]`. Out: an int or a `Formula`, which a Trace may hold
where a capture has a `torch.SymInt`: it prints, tells its symbols and computes its value. A tree is checked when it is
read: known functions of few arguments, symbols that are plain names, a bounded depth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tessera.util.errors import Unserial

DEEPEST, MOST_PARTS, LARGEST_POWER = 24, 64, 8
LARGEST = 1 << 62
SYMBOL = re.compile(r"[su]\w{0,62}")  # sizes given, and sizes known only when the program runs
Tree = object  # an int, a symbol's name, or (function, *trees)

# function: (how its arguments are joined in Python, what it computes)
_TEXT: dict[str, Callable[..., str]] = {
    "Add": lambda *a: f"({' + '.join(a)})",
    "Mul": lambda *a: f"({' * '.join(a)})",
    "Pow": lambda a, b: f"({a} ** {b})",
    "FloorDiv": lambda a, b: f"({a} // {b})",
    "CleanDiv": lambda a, b: f"({a} // {b})",
    "Mod": lambda a, b: f"({a} % {b})",
    "PythonMod": lambda a, b: f"({a} % {b})",
    "ModularIndexing": lambda a, b, c: f"({a} // {b} % {c})",
    "Max": lambda *a: f"builtins.max({', '.join(a)})",
    "Min": lambda *a: f"builtins.min({', '.join(a)})",
}
_VALUE: dict[str, Callable[..., int]] = {
    "Add": lambda *a: sum(a),
    "Mul": lambda *a: math.prod(a),
    "Pow": lambda a, b: a**b,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "ModularIndexing": lambda a, b, c: a // b % c,
    "Max": lambda *a: max(a),
    "Min": lambda *a: min(a),
}
_COUNT = {"Pow": 2, "FloorDiv": 2, "CleanDiv": 2, "Mod": 2, "PythonMod": 2, "ModularIndexing": 3}


@dataclass(frozen=True)
class Formula:
    tree: Tree

    def __str__(self) -> str:
        return _text(self.tree)

    def __mul__(self, other: int | Formula) -> Formula:
        return Formula(("Mul", self.tree, other.tree if isinstance(other, Formula) else other))

    __rmul__ = __mul__

    @property
    def names(self) -> frozenset[str]:
        return frozenset(_names(self.tree))

    def value(self, symbols: Mapping[str, int]) -> int:
        return _value(self.tree, symbols)

    def renamed(self, names: Mapping[str, str]) -> Formula:
        """The same over symbols of other names."""
        return Formula(_renamed(self.tree, names))

    def solved(self, name: str, value: int, symbols: Mapping[str, int]) -> int | None:
        """What the symbol has to be for the formula to have this value; None where no number does, or where the formula
        is not as many times the symbol and something."""
        try:
            start = self.value({**symbols, name: 0})
            step = self.value({**symbols, name: 1}) - start
            number = (value - start) // step
            return number if self.value({**symbols, name: number}) == value else None
        except ArithmeticError:
            return None


class Formulas:
    """Reads sizes as ints and formulas. Where `known` is given, symbols are among these."""

    def __init__(self, known: Collection[str] | None = None) -> None:
        self.known = known

    def read(self, data: object) -> int | Formula:
        if type(data) is int:
            return _number(data)
        if not isinstance(data, list) or len(data) != 2 or data[0] != "size":
            raise Unserial(f"expected a size, got {str(data)[:80]}")
        tree = self._tree(data[1], DEEPEST)
        return tree if isinstance(tree, int) else Formula(tree)

    def _tree(self, data: object, left: int) -> Tree:
        if type(data) is int:
            return _number(data)
        if isinstance(data, str):
            if not SYMBOL.fullmatch(data) or (self.known is not None and data not in self.known):
                raise Unserial(f"a size of the name {data[:80]!r}, which the program does not have")
            return data
        if not isinstance(data, list) or not data or not left:
            raise Unserial(f"expected the formula of a size, got {str(data)[:80]}")
        name, parts = data[0], [self._tree(part, left - 1) for part in data[1:]]
        if not isinstance(name, str) or name not in _TEXT or not 1 <= len(parts) <= MOST_PARTS:
            raise Unserial(f"a size computed by {str(name)[:80]}")
        if len(parts) != _COUNT.get(name, len(parts)):
            raise Unserial(f"expected {_COUNT[name]} arguments of {name}, got {len(parts)}")
        if name == "Pow" and not (isinstance(parts[1], int) and 0 <= parts[1] <= LARGEST_POWER):
            raise Unserial(f"a size to the power of {str(parts[1])[:80]}")
        if name == "Pow" and _has_power(parts[0]):  # else a short text is a number beyond all memory
            raise Unserial("a power of a power as a size")
        return (name, *parts)


def _number(data: int) -> int:
    if abs(data) > LARGEST:
        raise Unserial("a size that no tensor can have")
    return data


def formula_data(size: int | Formula) -> object:
    """As `Formulas` reads it."""
    return ["size", _tree_data(size.tree)] if isinstance(size, Formula) else size


def _tree_data(tree: Tree) -> object:
    return [tree[0], *map(_tree_data, tree[1:])] if isinstance(tree, tuple) else tree


def row_major(shape: Sequence[int | Formula], stride: Sequence[int | Formula]) -> bool:
    """Each stride is the product of the sizes after it, as far as the formulas say so."""
    step: tuple[int, tuple] = (1, ())
    for size, own in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and _product(own) != step:
            return False
        factor, parts = _product(size)
        step = (step[0] * factor, tuple(sorted((*step[1], *parts))))
    return True


def _product(size: int | Formula) -> tuple[int, tuple]:
    """A size as a number times the texts of what else is multiplied, in order."""
    factor, parts, left = 1, [], [size.tree if isinstance(size, Formula) else size]
    while left:
        tree = left.pop()
        if isinstance(tree, int):
            factor *= tree
        elif isinstance(tree, tuple) and tree[0] == "Mul":
            left += tree[1:]
        else:
            parts.append(_text(tree))
    return factor, tuple(sorted(parts))


def _has_power(tree: Tree) -> bool:
    return isinstance(tree, tuple) and (tree[0] == "Pow" or any(map(_has_power, tree[1:])))


def _renamed(tree: Tree, names: Mapping[str, str]) -> Tree:
    if isinstance(tree, str):
        return names.get(tree, tree)
    return (tree[0], *(_renamed(part, names) for part in tree[1:])) if isinstance(tree, tuple) else tree


def _text(tree: Tree) -> str:
    if isinstance(tree, tuple):
        return _TEXT[tree[0]](*map(_text, tree[1:]))
    return f"({tree})" if isinstance(tree, int) and tree < 0 else str(tree)


def _names(tree: Tree) -> set[str]:
    if isinstance(tree, str):
        return {tree}
    return set[str]().union(*map(_names, tree[1:])) if isinstance(tree, tuple) else set()


def _value(tree: Tree, symbols: Mapping[str, int]) -> int:
    if isinstance(tree, str):
        return symbols[tree]
    return _VALUE[tree[0]](*(_value(part, symbols) for part in tree[1:])) if isinstance(tree, tuple) else tree  # type: ignore[return-value]
