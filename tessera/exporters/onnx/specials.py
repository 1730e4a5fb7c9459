"""Tessera's own operators in ONNX: numbers, claims about sizes, control flow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tessera.ir.equation import NUMBER, Equation, Special

if TYPE_CHECKING:
    from tessera.exporters.onnx.lower import Lowering


def special(lowering: Lowering, eqn: Equation) -> Any:
    op = eqn.op
    assert isinstance(op, Special)
    if op is NUMBER:
        return lowering.g.op("Squeeze", lowering.g.compute(eqn.args[0]), shape=())
    if op.name == "check":
        return []
    if op.name == "keep_grad":
        return lowering.env[eqn.args[1]]  # type: ignore[index]
    if op.name == "laid_out":
        return lowering.env[eqn.args[0]]  # type: ignore[index]
    return None
