"""Tessera's own operators in ONNX: numbers, claims about sizes, control flow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tessera.exporters.onnx.control import cond, scan, while_loop
from tessera.ir.equation import NUMBER, Equation, Special
from tessera.ops.control import COND, SCAN, WHILE_LOOP

if TYPE_CHECKING:
    from tessera.exporters.onnx.lower import Lowering

_CONTROL = {COND: cond, WHILE_LOOP: while_loop, SCAN: scan}


def special(lowering: Lowering, eqn: Equation) -> Any:
    op = eqn.op
    assert isinstance(op, Special)
    if op in _CONTROL:
        return _CONTROL[op](lowering, eqn)
    if op is NUMBER:
        return lowering.g.op("Squeeze", lowering.g.compute(eqn.args[0]), shape=())
    if op.name == "check":
        return []
    if op.name == "keep_grad":
        return lowering.env[eqn.args[1]]  # type: ignore[index]
    if op.name == "laid_out":
        return lowering.env[eqn.args[0]]  # type: ignore[index]
    return None
