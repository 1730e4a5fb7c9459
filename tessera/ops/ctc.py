"""Connectionist temporal classification, by the losses of its sequences.

    ctc_loss(logs, targets, lengths, target_lengths, blank, zero_infinity)   -> losses
    ctc_grads(logs, targets, lengths, target_lengths, blank, zero_infinity)  -> losses, grads

logs is `(time, sequences, classes)`; each sequence has a loss. Lengths are tensors, or numbers. What PyTorch's
kernel keeps for backward is as large as the longest of the lengths, which only a run knows. Each loss depends on its
own sequence alone, so its gradients are known up to a factor when it is computed: they are as large as the logs, and
differentiation keeps those instead.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Special, Value
from tessera.ops.families import per_input
from tessera.ops.op import declare
from tessera.torch_internals.fake import FakeTensor
from tessera.util.errors import DerivativeError

MEAN, SUM = 1, 2
_COST = 20  # operations for every element read

_KERNEL, _BACKWARD = torch.ops.aten._ctc_loss.Tensor, torch.ops.aten._ctc_loss_backward.Tensor


def _loss(logs: Tensor, targets: Tensor, lengths: Tensor, wanted: Tensor, blank: int, zero: bool) -> Tensor:
    if isinstance(logs, FakeTensor):
        return logs.new_empty(logs.shape[1:2])
    return _KERNEL(logs, targets, lengths, wanted, blank, zero)[0]


def _grads(logs: Tensor, targets: Tensor, lengths: Tensor, wanted: Tensor, blank: int, zero: bool) -> list[Tensor]:
    if isinstance(logs, FakeTensor):
        return [logs.new_empty(logs.shape[1:2]), logs.new_empty(logs.shape)]
    given = logs, targets, lengths, wanted
    losses, kept = _KERNEL(*given, blank, zero)
    return [losses, _BACKWARD(torch.ones_like(losses), *given, losses, kept, blank, zero).contiguous()]


CTC_LOSS, CTC_GRADS = Special("ctc_loss", _loss), Special("ctc_grads", _grads)
LENGTHS = Special("lengths", torch.tensor)
Lengths = Value | Sequence[int]


def _batched(logs: Value, targets: Value, lengths: Lengths, wanted: Lengths) -> list[Value]:
    """One sequence is a batch of one."""
    lengths, wanted = (x if isinstance(x, Value) else emit(LENGTHS, list(x)) for x in (lengths, wanted))  # type: ignore[assignment]
    if logs.ndim == 3:
        return [logs, targets, lengths, wanted]  # type: ignore[list-item]
    return [aten.unsqueeze(logs, 1), aten.reshape(targets, [1, -1]), *(aten.reshape(x, [1]) for x in (lengths, wanted))]


def _counts(wanted: Value, like: Value) -> Value:
    return aten.clamp_min(aten._to_copy(wanted, dtype=like.dtype, device=like.tensor.device), 1)


def _reduced(losses: Value, wanted: Value, reduction: int, zero: bool, batched: bool) -> Value:
    if zero:
        losses = aten.where(aten.eq(losses, float("inf")), aten.zeros_like(losses), losses)
    if reduction == MEAN:
        return aten.mean(aten.div(losses, _counts(wanted, losses)))
    return aten.sum(losses) if reduction == SUM else losses if batched else aten.squeeze(losses, [0])


def written_out(
    logs: Value, targets: Value, lengths: Lengths, wanted: Lengths, blank: int, reduction: int, zero: bool
) -> Value:
    """PyTorch's operator, by the losses of the sequences."""
    every = _batched(logs, targets, lengths, wanted)
    losses = emit(CTC_LOSS, *every, blank, zero)
    assert isinstance(losses, Value)
    return _reduced(losses, every[3], reduction, zero, logs.ndim == 3)


def _forward(
    need: Sequence[object], logs: Value, targets: Value, lengths: Lengths, wanted: Lengths, blank: int,
    reduction: int, zero: bool,
) -> Generator[Value, Value, tuple]:  # fmt: skip
    every = _batched(logs, targets, lengths, wanted)
    losses, grads = emit(CTC_GRADS, *every, blank, zero)  # type: ignore[misc]
    ct = yield _reduced(losses, every[3], reduction, zero, logs.ndim == 3)
    if reduction == MEAN:
        ct = aten.div(aten.div(ct, losses.shape[0]), _counts(every[3], losses))
    if ct.ndim:
        ct = aten.unsqueeze(ct, -1)
    pulled = aten.mul(grads, ct)
    return pulled if logs.ndim == 3 else aten.squeeze(pulled, [1]), None, None, None


def _unwritten(*_: object, **__: object) -> NoReturn:
    raise DerivativeError("the derivative of the gradient of ctc_loss is not implemented, in PyTorch neither")


declare("aten.ctc_loss", "loss", forward=_forward, cost=per_input(_COST))
declare("tessera.ctc_loss", "loss", vjp=_unwritten, jvp=_unwritten, cost=per_input(_COST))
declare("tessera.ctc_grads", "loss", vjp=_unwritten, jvp=_unwritten, cost=per_input(2 * _COST))
