"""Sizes as data: whole numbers as they are, symbolic ones as the tree of their expression.

A symbol is written by its name. `Sizes` reads sizes for a program that was captured now: names stand for the symbols of
its shape environment, so what comes back belongs to the same environment as the program's own sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from tessera.ir.formula import Formula, Formulas
from tessera.ir.types import Size
from tessera.torch_internals import shapes
from tessera.util.errors import Unserial

if TYPE_CHECKING:
    import sympy

_TORCH = (
    "FloorDiv", "ModularIndexing", "Mod", "PythonMod", "CleanDiv", "Max", "Min", "ToFloat", "IntTrueDiv",
    "FloatTrueDiv", "FloatPow", "OpaqueUnaryFn_sqrt", "TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt",
)  # fmt: skip


@functools.cache
def functions() -> dict[str, type]:
    """The functions of sizes by their names. SymPy is imported where a symbolic size is."""
    import sympy

    theirs = {name: getattr(shapes.size_functions, name) for name in _TORCH if hasattr(shapes.size_functions, name)}
    return {"Add": sympy.Add, "Mul": sympy.Mul, "Pow": sympy.Pow, **theirs}


@functools.cache
def _names() -> dict[type, str]:
    return {cls: name for name, cls in functions().items()}


def write_size(size: object, runtime: bool = False) -> object:
    """An int, or ["size", expression]. `runtime`: also sizes that are known only when the program runs."""
    if type(size) is int:
        return size
    if type(size) is not torch.SymInt or size.node.constant is not None:
        raise Unserial(f"a size of type {type(size).__name__}")
    return ["size", _write(size.node.expr, runtime)]


def write_number(number: torch.SymFloat, runtime: bool = False) -> object:
    """A float that sizes decide, in the same form."""
    return ["size", _write(number.node.expr, runtime)]


def _write(expr: sympy.Basic, runtime: bool) -> object:
    if expr.is_Integer:
        return int(expr)  # type: ignore[arg-type]
    if expr.is_Float:
        return float(expr)  # type: ignore[arg-type]
    if expr.is_Symbol:
        if not runtime and not str(expr).startswith("s"):
            raise Unserial(f"the size {expr} is known only when the program runs")
        return str(expr)
    name = _names().get(type(expr))
    if name is None:
        raise Unserial(f"a size computed by {type(expr).__name__}")
    return [name, *(_write(part, runtime) for part in expr.args)]


def formula_of(size: object) -> int | Formula:
    """The same without SymPy."""
    return Formulas().read(write_size(size, runtime=True))


class Sizes:
    """Reads sizes; `around` are those of the program that the symbols belong to."""

    def __init__(self, around: Iterable[object] = ()) -> None:
        self.env: shapes.ShapeEnv | None = None
        self.symbols: dict[str, sympy.Symbol] = {}
        self._made: dict[str, Size] = {}
        for size in around:
            if isinstance(size, torch.SymInt):
                self.env = size.node.shape_env
                self.symbols |= {s.name: s for s in size.node.expr.free_symbols}

    def read(self, data: object) -> Size:
        if type(data) is int:
            return data
        key = str(data)
        if key not in self._made:
            if self.env is None or not isinstance(data, list) or data[0] != "size":
                raise Unserial(f"a size that does not belong to the program: {data}")
            self._made[key] = self.env.create_symintnode(self._read(data[1]), hint=None)  # an int where it is one
        return self._made[key]

    def number(self, data: list) -> float | torch.SymFloat:
        """As `write_number` writes it."""
        if self.env is None:
            raise Unserial(f"a number that does not belong to the program: {data}")
        return self.env.create_symfloatnode(self._read(data[1]), hint=None)

    def _read(self, data: object) -> sympy.Expr:
        if type(data) in (int, float):
            return functions()["Add"](data)
        if isinstance(data, str):
            if data not in self.symbols:
                raise Unserial(f"a size of the name {data}, which the program does not have")
            return self.symbols[data]
        assert isinstance(data, list)
        return functions()[data[0]](*map(self._read, data[1:]))
