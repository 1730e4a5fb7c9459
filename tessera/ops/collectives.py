"""Collectives that a model calls itself, by PyTorch's functional collectives.

In: one rank's program, in which they stand as equations; each begins an exchange, which `wait_tensor` ends. Out: their
derivatives, which are collectives again. What is sought is the gradient of the sum of all ranks' losses, so a cotangent
goes the way back: a gathered value's is reduced and scattered, that of one that all ranks got is summed. An average is
a sum with a factor. The largest or smallest has no derivative, as in PyTorch.

They have effects (`ir/schema`): all ranks call them in the order in which the model does, whatever is done to the rest
of a rank's program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Arg, Equation, Value
from tessera.ops.op import declare
from tessera.torch_internals import distributed as c10d
from tessera.torch_internals.operators import op_name

LINEAR = ("sum", "avg")


def _exchange(op: Any, x: Value, *args: Arg) -> Value:
    """The result of an exchange, waited for."""
    given = x if x.tensor.is_row_major else aten.clone(x, memory_format=torch.contiguous_format)
    return emit(c10d.wait_tensor, emit(op, given, *args))


def _is_linear(eqn: Equation) -> bool:
    return str(eqn.args[1]).lower() in LINEAR


def _scattered(ct: Value, y: Value, x: Value, ranks: int, group: Arg) -> tuple:
    return lambda: _exchange(c10d.reduce_scatter_tensor, ct, "sum", ranks, group), None, None


def _gathered(ct: Value, y: Value, x: Value, how: str, ranks: int, group: Arg) -> tuple:
    def gathered() -> Value:
        whole = _exchange(c10d.all_gather_into_tensor, ct, ranks, group)
        return whole / ranks if how.lower() == "avg" else whole

    return gathered, None, None, None


def _sent_back(ct: Value, y: Value, x: Value, came: Arg, sent: Arg, group: Arg) -> tuple:
    return lambda: _exchange(c10d.all_to_all_single, ct, sent, came, group), None, None, None


def _to_source(ct: Value, y: Value, x: Value, source: int, group: Arg) -> tuple:
    """Everyone's cotangent belongs to the rank whose value all of them got; the others' own counted for nothing."""

    def summed() -> Value:
        total = _exchange(c10d.all_reduce, ct, "sum", group)
        return total if c10d.group_of(group).rank() == source else aten.zeros_like(total)

    return summed, None, None


def _on_tangent(op: Any) -> Any:
    return lambda ts, y, x, *args: emit(op, ts[0], *args)


def _elementwise(op: Any) -> Any:
    def batch(size: Arg, on: Sequence[bool], x: Value, *args: Arg) -> Value:
        return emit(op, x, *args)

    return batch


def _no_flops(eqn: Equation) -> float:
    return 0.0


def _collective(op: Any, vjp: Any, **rules: Any) -> None:
    """Tangents are exchanged as values are, and nothing is computed."""
    name = f"_c10d_functional.{op_name(op)}"
    declare(name, "collective", vjp=vjp, jvp=_on_tangent(op), cost=_no_flops, real=False, **rules)


def _summed(ct: Value, y: Value, x: Value, how: Arg, group: Arg) -> tuple:
    return lambda: _exchange(c10d.all_reduce, ct, how, group), None, None


_collective(c10d.wait_tensor, lambda ct, y, x: (ct,), batch=_elementwise(c10d.wait_tensor))
_collective(c10d.all_reduce, _summed, batch=_elementwise(c10d.all_reduce), applies=_is_linear)
_collective(c10d.broadcast, _to_source, batch=_elementwise(c10d.broadcast))
_collective(c10d.all_gather_into_tensor, _scattered)
_collective(c10d.reduce_scatter_tensor, _gathered, applies=_is_linear)
_collective(c10d.all_to_all_single, _sent_back)
