"""Operators PyTorch lacks, as `Special`s: what a write under no_grad leaves, and control flow. The latter holds
sub-traces: programs with no constants, whose inputs are the equation's operands. Here stands what it is and how it
runs; its derivatives and batching, which transform the sub-traces, stand in `transforms/control`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.ir.alias import KEEP_GRAD
from tessera.ir.builder import aten, emit
from tessera.ir.call import Sub, runnable
from tessera.ir.equation import Special, Value
from tessera.ir.types import Size
from tessera.ops.custom import types_only
from tessera.ops.families import carry
from tessera.ops.op import declare
from tessera.torch_internals.fake import FakeTensor
from tessera.torch_internals.memory import storage_id

# --- keep_grad(old, new, tangent): the value of `new` with the gradient history of `old` -----------


def _keep_grad_batch(size: Size, on: Sequence[bool], old: Value, new: Value, tangent: bool = False) -> Value:
    return emit(KEEP_GRAD, carry(old, on[0], size), carry(new, on[1], size), tangent)


def _keep_grad_jvp(ts: Sequence, y: Value, old: Value, new: Value, tangent: bool = False) -> object:
    """A write under no_grad writes the tangent too, which keeps its own history as the value does."""
    was, now = ts[:2]
    if tangent or was is None:
        return was if tangent else now
    return emit(KEEP_GRAD, was, aten.zeros_like(was) if now is None else now)


declare(
    "tessera.keep_grad",
    "control",
    vjp=lambda ct, y, old, new, tangent=False: (ct, None),
    jvp=_keep_grad_jvp,
    batch=_keep_grad_batch,
    real=False,
)

# --- control flow ---------------------------------------------------------------------------------


def _fresh(outs: Sequence, operands: Sequence) -> list:
    """Results that share no memory with an operand: whoever gets them may write them."""
    held = {storage_id(x) for x in operands if isinstance(x, torch.Tensor)}
    return [x.clone() if storage_id(x) in held else x for x in outs]


def _cond(pred: object, true: Sub, false: Sub, *operands: object) -> list:
    if isinstance(pred, FakeTensor):  # only types are asked for, and both branches give the same
        runnable(false)(*operands)
        return list(runnable(true)(*operands))
    return _fresh(runnable(true if bool(pred) else false)(*operands), operands)


def _while_loop(test: Sub, body: Sub, carried: int, *operands: object) -> list:
    carry, rest = list(operands[:carried]), operands[carried:]
    if types_only(operands):
        runnable(test)(*carry, *rest)
        return list(runnable(body)(*carry, *rest))
    while bool(runnable(test)(*carry, *rest)[0]):
        carry = list(runnable(body)(*carry, *rest))
    return _fresh(carry, operands)


def _scan(body: Sub, carried: int, sliced: int, reverse: bool, *operands: torch.Tensor) -> list:
    carry, xs, rest = list(operands[:carried]), operands[carried : carried + sliced], operands[carried + sliced :]
    length = xs[0].shape[0]
    rows: list[list] = []
    for t in reversed(range(length)) if reverse else range(length):
        outs = runnable(body)(*carry, *(x[t] for x in xs), *rest)
        carry = list(outs[:carried])
        rows.append(list(outs[carried:]))
    if reverse:
        rows.reverse()
    return [*_fresh(carry, operands), *(torch.stack(column) for column in zip(*rows, strict=True))]


# cond(pred, true, false, *operands); while_loop(test, body, carried, *carry, *captured);
# scan(body, carried, sliced, reverse, *carry, *xs, *captured): body(carry, x, captured) gives (carry, y), and the
# whole the last carry and all y, stacked.
COND = Special("cond", _cond)
WHILE_LOOP = Special("while_loop", _while_loop)
SCAN = Special("scan", _scan)
