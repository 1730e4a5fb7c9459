"""Symbolic sizes without SymPy: formulas over named sizes, as stored programs hold them.

In: a size as `serial_size` writes it, an int or `["size", tree]`. Out: an int or a `Formula`, which a Trace may hold
where a capture has a `torch.SymInt`, or a `torch.SymFloat` of sizes: it prints, tells its symbols and computes its
value. A tree is checked when it is read: known functions of few arguments, symbols that are plain names, a bounded
depth.
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
FLOAT = re.compile(r"zuf\d{1,9}")  # a float that a tensor holds, known only then
Tree = object  # a number, a symbol's name, or (function, *trees)


@dataclass(frozen=True)
class _Function:
    """`text`: how its arguments are joined in Python. `gives`: a whole number, a float, or, for None, a float where an
    argument is one. `count`: of its arguments, where not any."""

    text: Callable[..., str]
    value: Callable[..., int | float]
    gives: type | None = int
    count: int | None = None
    whole: bool = False  # whether its arguments are whole numbers


def _called(name: str) -> Callable[..., str]:
    return lambda *a: f"{name}({', '.join(a)})"


def _between(sign: str) -> Callable[..., str]:
    return lambda *a: f"({f' {sign} '.join(a)})"


_FUNCTIONS: dict[str, _Function] = {
    "Add": _Function(_between("+"), lambda *a: sum(a), None),
    "Mul": _Function(_between("*"), lambda *a: math.prod(a), None),
    "Max": _Function(_called("builtins.max"), lambda *a: max(a), None),
    "Min": _Function(_called("builtins.min"), lambda *a: min(a), None),
    "Pow": _Function(_between("**"), lambda a, b: a**b, None, 2),
    "FloorDiv": _Function(_between("//"), lambda a, b: a // b, count=2, whole=True),
    "CleanDiv": _Function(_between("//"), lambda a, b: a // b, count=2, whole=True),
    "Mod": _Function(_between("%"), lambda a, b: a % b, count=2, whole=True),
    "PythonMod": _Function(_between("%"), lambda a, b: a % b, count=2, whole=True),
    "ModularIndexing": _Function(
        lambda a, b, c: f"({a} // {b} % {c})", lambda a, b, c: a // b % c, count=3, whole=True
    ),
    "ToFloat": _Function(_called("builtins.float"), float, float, 1),
    "IntTrueDiv": _Function(_between("/"), lambda a, b: a / b, float, 2),
    "FloatTrueDiv": _Function(_between("/"), lambda a, b: a / b, float, 2),
    "FloatPow": _Function(_called("math.pow"), math.pow, float, 2),
    "OpaqueUnaryFn_sqrt": _Function(_called("math.sqrt"), math.sqrt, float, 1),
    "TruncToInt": _Function(_called("math.trunc"), int, count=1),
    "FloorToInt": _Function(_called("math.floor"), math.floor, count=1),
    "CeilToInt": _Function(_called("math.ceil"), math.ceil, count=1),
    "RoundToInt": _Function(_called("builtins.round"), round, count=1),
}


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

    @property
    def is_float(self) -> bool:
        return _is_float(self.tree)

    def value(self, symbols: Mapping[str, int]) -> int:
        return _value(self.tree, symbols)  # type: ignore[return-value]

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
        size = _number(data) if type(data) is int else self.number(data)
        if isinstance(size, float) or (isinstance(size, Formula) and size.is_float):
            raise Unserial(f"expected a whole number as a size, got {str(data)[:80]}")
        return size

    def number(self, data: object) -> int | float | Formula:
        """What sizes decide, whole or not."""
        if not isinstance(data, list) or len(data) != 2 or data[0] != "size":
            raise Unserial(f"expected a size, got {str(data)[:80]}")
        tree = self._tree(data[1], DEEPEST)
        return tree if isinstance(tree, (int, float)) else Formula(tree)

    def _tree(self, data: object, left: int) -> Tree:
        if type(data) in (int, float):
            return _number(data)  # type: ignore[arg-type]
        if isinstance(data, str):
            plain = SYMBOL.fullmatch(data) or FLOAT.fullmatch(data)
            if not plain or (self.known is not None and data not in self.known):
                raise Unserial(f"a size of the name {data[:80]!r}, which the program does not have")
            return data
        if not isinstance(data, list) or not data or not left:
            raise Unserial(f"expected the formula of a size, got {str(data)[:80]}")
        name, parts = data[0], [self._tree(part, left - 1) for part in data[1:]]
        function = _FUNCTIONS.get(name) if isinstance(name, str) else None
        if function is None or not 1 <= len(parts) <= MOST_PARTS:
            raise Unserial(f"a size computed by {str(name)[:80]}")
        if function.count not in (None, len(parts)):
            raise Unserial(f"expected {function.count} arguments of {name}, got {len(parts)}")
        if function.whole and any(map(_is_float, parts)):
            raise Unserial(f"expected whole numbers as arguments of {name}")
        if name == "Pow" and not (isinstance(parts[1], int) and 0 <= parts[1] <= LARGEST_POWER):
            raise Unserial(f"a size to the power of {str(parts[1])[:80]}")
        if name == "Pow" and _has_power(parts[0]):  # else a short text is a number beyond all memory
            raise Unserial("a power of a power as a size")
        return (name, *parts)


def _number(data: int | float) -> int | float:
    if not abs(data) <= LARGEST:  # nor is NaN
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
        return _FUNCTIONS[tree[0]].text(*map(_text, tree[1:]))
    return f"({tree})" if isinstance(tree, (int, float)) and tree < 0 else str(tree)


def _is_float(tree: Tree) -> bool:
    if isinstance(tree, str):
        return FLOAT.fullmatch(tree) is not None
    if not isinstance(tree, tuple):
        return isinstance(tree, float)
    gives = _FUNCTIONS[tree[0]].gives
    return any(map(_is_float, tree[1:])) if gives is None else gives is float


def _names(tree: Tree) -> set[str]:
    if isinstance(tree, str):
        return {tree}
    return set[str]().union(*map(_names, tree[1:])) if isinstance(tree, tuple) else set()


def _value(tree: Tree, symbols: Mapping[str, int]) -> int | float:
    if isinstance(tree, str):
        return symbols[tree]
    if isinstance(tree, tuple):
        return _FUNCTIONS[tree[0]].value(*(_value(part, symbols) for part in tree[1:]))
    return tree  # type: ignore[return-value]
