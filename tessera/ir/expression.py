"""Symbolic numbers as Python.

In: a symbolic size, number or truth value, or the formula of one. Out: the text that computes it from its symbols,
which are names around it. All else that a text mentions stands in `NAMES`. Python's own functions are `builtins.max`,
never `max`: that is what the result of `aten.max` is called.
"""

from __future__ import annotations

import builtins
import functools
import math
import re
from typing import TYPE_CHECKING, Any

import torch

from tessera.ir.formula import Formula
from tessera.torch_internals import shapes

if TYPE_CHECKING:
    import sympy

NAMES: dict[str, object] = {"builtins": builtins, "math": math, "torch": torch}
_CALL = re.compile(r"(?<![\w.])(\w+)(?=\()")


def expression(number: torch.SymInt | torch.SymFloat | torch.SymBool | Formula) -> str:
    return str(number) if isinstance(number, Formula) else text_of(number.node.expr)


def text_of(expr: sympy.Basic) -> str:
    return _CALL.sub(_qualified, _printer().doprint(expr))


def _qualified(call: re.Match[str]) -> str:
    return f"builtins.{call[1]}" if hasattr(builtins, call[1]) else call[1]


@functools.cache
def _printer() -> Any:
    """PyTorch's printer, and what it leaves out. A program without symbolic sizes does without SymPy."""

    class Printer(shapes.PythonPrinter):
        def _print_Where(self, expr: sympy.Expr) -> str:
            test, yes, no = map(self._print, expr.args)  # type: ignore[attr-defined]
            return f"({yes} if {test} else {no})"

        def _print_TruncToFloat(self, expr: sympy.Expr) -> str:
            return f"float(math.trunc({self._print(expr.args[0])}))"  # type: ignore[attr-defined]

        def _print_Function(self, expr: sympy.Expr) -> str:
            """`OpaqueUnaryFn_exp` and its like are functions of `math`."""
            name = type(expr).__name__.removeprefix("OpaqueUnaryFn_")
            if not hasattr(math, name):
                raise NotImplementedError(f"the number {expr} has no text: nothing here computes {name}")
            return f"math.{name}({', '.join(map(self._print, expr.args))})"  # type: ignore[attr-defined]

    return Printer()
