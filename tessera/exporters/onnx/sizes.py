"""Symbolic numbers as ONNX arithmetic.

In: a symbolic size, number or truth value, and where its symbols come from: a dimension of a value, or a number that
the program computes. Out: a tensor of one element, an integer of 64 bits, a double or a truth value. A symbol is read
by `Shape` of that one dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tessera.exporters.onnx.errors import ExportError
from tessera.exporters.onnx.graph import Graph, Ref

_BINARY = {"Add": "Add", "Mul": "Mul", "Max": "Max", "Min": "Min"}
_COMPARE = {
    "GreaterThan": "GreaterOrEqual", "StrictGreaterThan": "Greater", "LessThan": "LessOrEqual",
    "StrictLessThan": "Less", "Equality": "Equal",
}  # fmt: skip
_FUNCTIONS = {
    "OpaqueUnaryFn_sqrt": "Sqrt", "OpaqueUnaryFn_exp": "Exp", "OpaqueUnaryFn_log": "Log", "OpaqueUnaryFn_sin": "Sin",
    "OpaqueUnaryFn_cos": "Cos", "OpaqueUnaryFn_tanh": "Tanh",
}  # fmt: skip


class Numbers:
    """The symbolic numbers of one graph. `symbol` gives the tensor of one element that a symbol's name stands for."""

    def __init__(self, g: Graph, symbol: Callable[[str], Ref]) -> None:
        self.g, self.symbol = g, symbol

    def __call__(self, number: Any) -> Ref:
        return self.expr(number.node.expr)

    def expr(self, e: Any) -> Ref:
        key = str(e)
        if key not in self.g.sizes:
            with self.g.shared():
                self.g.sizes[key] = self.write(e)
        return self.g.sizes[key]

    def write(self, e: Any) -> Ref:
        g, kind = self.g, type(e).__name__
        if e.is_Symbol:
            return self.symbol(str(e))
        if e.is_Integer:
            return g.ints([int(e)])
        if e.is_Number:
            return g.full(float(e), torch.float64, [1])
        if kind in ("BooleanTrue", "BooleanFalse"):
            return g.full(bool(e), torch.bool, [1])
        if kind in _BINARY:
            return self.folded(_BINARY[kind], [self.expr(a) for a in e.args])
        if kind in ("And", "Or"):
            return self.folded(kind, [self.expr(a) for a in e.args])
        if kind in _COMPARE:
            return g.op(_COMPARE[kind], *self.alike(*map(self.expr, e.args)), dtype=torch.bool, shape=(1,))
        if (rule := getattr(self, f"write_{kind}", None)) is not None:
            return rule(*e.args)
        if kind in _FUNCTIONS:
            return g.op(_FUNCTIONS[kind], self.double(e.args[0]), shape=(1,))
        raise ExportError(f"ONNX has no form for the number {e} ({kind})")

    def folded(self, kind: str, parts: list[Ref]) -> Ref:
        out = parts[0]
        for part in parts[1:]:
            out = self.g.op(kind, *self.alike(out, part), shape=(1,))
        return out

    def alike(self, a: Ref, b: Ref) -> tuple[Ref, Ref]:
        dtype = torch.promote_types(a.dtype, b.dtype)
        return self.g.cast(a, dtype), self.g.cast(b, dtype)

    def double(self, e: Any) -> Ref:
        return self.g.cast(self.expr(e), torch.float64)

    # --- functions that PyTorch's sizes are made of ---

    def write_Not(self, e: Any) -> Ref:
        return self.g.op("Not", self.expr(e), shape=(1,))

    def write_Unequality(self, a: Any, b: Any) -> Ref:
        equal = self.g.op("Equal", *self.alike(self.expr(a), self.expr(b)), dtype=torch.bool, shape=(1,))
        return self.g.op("Not", equal, shape=(1,))

    def write_Pow(self, base: Any, exponent: Any) -> Ref:
        if exponent.is_Integer and 0 < int(exponent) <= 4:
            return self.folded("Mul", [self.expr(base)] * int(exponent))
        return self.g.op("Pow", self.double(base), self.double(exponent), shape=(1,))

    write_FloatPow = write_Pow

    def write_PowByNatural(self, base: Any, exponent: Any) -> Ref:
        return self.g.op("Pow", self.expr(base), self.expr(exponent), shape=(1,))

    def write_FloorDiv(self, a: Any, b: Any) -> Ref:
        """ONNX rounds towards zero: what may be negative loses its remainder first."""
        top, bottom = self.expr(a), self.expr(b)
        if not (a.is_nonnegative and b.is_positive):
            top = self.g.op("Sub", top, self.g.op("Mod", top, bottom, shape=(1,)), shape=(1,))
        return self.g.op("Div", top, bottom, shape=(1,))

    def write_CleanDiv(self, a: Any, b: Any) -> Ref:
        return self.g.op("Div", self.expr(a), self.expr(b), shape=(1,))

    def write_CeilToInt(self, a: Any) -> Ref:
        return self.g.cast(self.g.op("Ceil", self.double(a), shape=(1,)), torch.int64)

    def write_FloorToInt(self, a: Any) -> Ref:
        return self.g.cast(self.g.op("Floor", self.double(a), shape=(1,)), torch.int64)

    def write_TruncToInt(self, a: Any) -> Ref:
        return self.g.cast(self.double(a), torch.int64)

    def write_RoundToInt(self, a: Any) -> Ref:
        return self.g.cast(self.g.op("Round", self.double(a), shape=(1,)), torch.int64)

    def write_ToFloat(self, a: Any) -> Ref:
        return self.double(a)

    def write_IntTrueDiv(self, a: Any, b: Any) -> Ref:
        return self.g.op("Div", self.double(a), self.double(b), shape=(1,))

    write_FloatTrueDiv = write_IntTrueDiv

    def write_Mod(self, a: Any, b: Any) -> Ref:
        return self.g.op("Mod", self.expr(a), self.expr(b), shape=(1,))

    write_PythonMod = write_Mod

    def write_ModularIndexing(self, a: Any, divisor: Any, modulus: Any) -> Ref:
        return self.g.op("Mod", self.write_FloorDiv(a, divisor), self.expr(modulus), shape=(1,))

    def write_Where(self, test: Any, yes: Any, no: Any) -> Ref:
        a, b = self.alike(self.expr(yes), self.expr(no))
        return self.g.op("Where", self.expr(test), a, b, dtype=a.dtype, shape=(1,))
