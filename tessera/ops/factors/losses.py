"""Losses as arithmetic that may be cut: means are those of the whole batch, classes may lie on several ranks."""

from __future__ import annotations

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ops.factors.rule import apart
from tessera.ops.families import cast

MEAN, SUM = 1, 2


def _reduced(x: Value, reduction: int) -> Value:
    return aten.mean(x) if reduction == MEAN else aten.sum(x) if reduction == SUM else x


@apart("mse_loss")
def mse_loss(eqn: Equation) -> object:
    x, y, reduction = eqn.bound()[0]
    off = aten.sub(x, y)
    return _reduced(aten.mul(off, off), reduction)


@apart("mse_loss_backward")
def mse_loss_backward(eqn: Equation) -> object:
    ct, x, y, reduction = eqn.bound()[0]
    scale = 2.0 / x.tensor.numel() if reduction == MEAN else 2.0
    if x.tensor.is_symbolic or x.tensor.numel() == 0:
        return None
    return aten.mul(aten.mul(aten.sub(x, y), scale), ct)


@apart("l1_loss")
def l1_loss(eqn: Equation) -> object:
    x, y, reduction = eqn.bound()[0]
    return _reduced(aten.abs(aten.sub(x, y)), reduction)


def _counted(target: Value, ignored: int, x: Value) -> tuple[Value, Value]:
    """Targets that may be looked up, and one for each that counts."""
    counts = aten.ne(target, ignored)
    return aten.where(counts, target, aten.zeros_like(target)), cast(counts, x.dtype)


def _in_classes(v: Value, x: Value) -> Value:
    """One number for each row, as a column."""
    return aten.unsqueeze(v, 1)


@apart("nll_loss_forward nll_loss")
def nll_loss(eqn: Equation) -> object:
    x, target, weight, reduction, ignored = eqn.bound()[0]
    if x.ndim != 2:
        return None
    safe, counts = _counted(target, ignored, x)
    if weight is not None:
        counts = aten.mul(counts, aten.index_select(weight, 0, safe))
    picked = aten.squeeze(aten.gather(x, 1, _in_classes(safe, x)), [1])
    each = aten.neg(aten.mul(picked, counts))
    if reduction == 0:
        return [each, aten.new_zeros(x, [])] if eqn.many else each
    total = aten.sum(counts)
    loss = aten.sum(each) if reduction == SUM else aten.div(aten.sum(each), total)
    return [loss, total] if eqn.many else loss


@apart("nll_loss_backward")
def nll_loss_backward(eqn: Equation) -> object:
    ct, x, target, weight, reduction, ignored, total = eqn.bound()[0]
    if x.ndim != 2:
        return None
    safe, counts = _counted(target, ignored, x)
    if weight is not None:
        counts = aten.mul(counts, aten.index_select(weight, 0, safe))
    scale = aten.div(ct, total) if reduction == MEAN else ct
    each = aten.neg(aten.mul(counts, scale))
    classes = aten.arange(x.shape[1], dtype=target.dtype, device=x.tensor.device)
    chosen = aten.eq(_in_classes(safe, x), classes)
    return aten.mul(cast(chosen, x.dtype), _in_classes(each, x))


@apart("cross_entropy_loss")
def cross_entropy(eqn: Equation) -> object:
    x, target, weight, reduction, ignored, smoothing = eqn.bound()[0]
    if x.ndim != 2 or smoothing or target.tensor.is_float:
        return None
    logs = aten._log_softmax(x, 1, False)
    loss, _ = aten.nll_loss_forward(logs, target, weight, reduction, ignored)
    return loss
