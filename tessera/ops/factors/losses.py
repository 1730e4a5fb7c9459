"""Losses as arithmetic that may be cut: means are those of the whole batch, classes may lie on several ranks."""

from __future__ import annotations

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ops.ctc import written_out
from tessera.ops.factors.rule import Factors, decomposed, rule
from tessera.ops.families import cast

MEAN, SUM = 1, 2


def _reduced(x: Value, reduction: int) -> Value:
    return aten.mean(x) if reduction == MEAN else aten.sum(x) if reduction == SUM else x


@decomposed("mse_loss")
def mse_loss(eqn: Equation) -> object:
    x, y, reduction = eqn.bound()[0]
    off = aten.sub(x, y)
    return _reduced(aten.mul(off, off), reduction)


@decomposed("mse_loss_backward")
def mse_loss_backward(eqn: Equation) -> object:
    ct, x, y, reduction = eqn.bound()[0]
    scale = 2.0 / x.tensor.numel() if reduction == MEAN else 2.0
    if x.tensor.is_symbolic or x.tensor.numel() == 0:
        return None
    return aten.mul(aten.mul(aten.sub(x, y), scale), ct)


@decomposed("l1_loss")
def l1_loss(eqn: Equation) -> object:
    x, y, reduction = eqn.bound()[0]
    return _reduced(aten.abs(aten.sub(x, y)), reduction)


def _counted(target: Value, ignored: int, x: Value, weight: Value | None) -> tuple[Value, Value]:
    """Targets that may be looked up, and how much each counts."""
    counts = aten.ne(target, ignored)
    safe, counts = aten.where(counts, target, aten.zeros_like(target)), cast(counts, x.dtype)
    if weight is not None:
        counts = aten.mul(counts, aten.squeeze(aten.embedding(aten.unsqueeze(weight, 1), safe), [-1]))
    return safe, counts


def _mean_or(reduction: int, each: Value, total: Value) -> Value:
    """Losses as asked for; a mean is over what counts."""
    return each if reduction == 0 else aten.sum(each) if reduction == SUM else aten.div(aten.sum(each), total)


# Classes are the second dimension; behind it there may be more, places of an image or a sequence.


@decomposed("nll_loss_forward nll_loss nll_loss2d_forward nll_loss2d nll_loss_nd")
def nll_loss(eqn: Equation) -> object:
    x, target, weight, reduction, ignored = eqn.bound()[0]
    if x.ndim < 2:
        return None
    safe, counts = _counted(target, ignored, x, weight)
    picked = aten.squeeze(aten.gather(x, 1, aten.unsqueeze(safe, 1)), [1])
    total = aten.sum(counts) if reduction else aten.new_zeros(x, [])
    loss = _mean_or(reduction, aten.neg(aten.mul(picked, counts)), total)
    return [loss, total] if eqn.many else loss


@decomposed("nll_loss_backward nll_loss2d_backward")
def nll_loss_backward(eqn: Equation) -> object:
    ct, x, target, weight, reduction, ignored, total = eqn.bound()[0]
    if x.ndim < 2:
        return None
    safe, counts = _counted(target, ignored, x, weight)
    scale = aten.div(ct, total) if reduction == MEAN else ct
    each = aten.neg(aten.mul(counts, scale))
    each = aten.where(aten.ne(target, ignored), each, aten.zeros_like(each))  # where nothing counts, the scale is NaN
    classes = aten.arange(x.shape[1], dtype=target.dtype, device=x.tensor.device)
    chosen = aten.eq(aten.unsqueeze(safe, 1), _over_classes(classes, x))
    return aten.mul(cast(chosen, x.dtype), aten.unsqueeze(each, 1))


def _over_classes(v: Value, x: Value) -> Value:
    """A vector over classes, so that it broadcasts against x."""
    return v if x.ndim == 2 else aten.view(v, [v.shape[0], *[1] * (x.ndim - 2)])


@decomposed("cross_entropy_loss")
def cross_entropy(eqn: Equation) -> object:
    x, target, weight, reduction, ignored, smoothing = eqn.bound()[0]
    if x.ndim < 2:
        return None
    logs = aten._log_softmax(x, 1, False)
    shares = None if weight is None else _over_classes(weight, x)
    if target.tensor.is_float:
        return _of_shares(logs, target, shares, reduction, smoothing)
    safe, counts = _counted(target, ignored, x, weight)
    picked = aten.squeeze(aten.gather(logs, 1, aten.unsqueeze(safe, 1)), [1])
    each, total = aten.neg(aten.mul(picked, counts)), aten.sum(counts)
    if not smoothing:
        return _mean_or(reduction, each, total)
    every = aten.neg(aten.sum(logs if shares is None else aten.mul(logs, shares), [1]))
    every = aten.mul(every, cast(aten.ne(target, ignored), x.dtype))
    parts = (aten.mul(each, 1 - smoothing), aten.mul(every, smoothing / x.shape[1]))
    return _mean_or(reduction, aten.add(*parts), total)


def _of_shares(logs: Value, target: Value, shares: Value | None, reduction: int, smoothing: float) -> object:
    """Targets say how much each class has; a mean is over rows and places."""
    if logs.tensor.is_symbolic or logs.tensor.numel() == 0:
        return None
    if smoothing:
        target = aten.add(aten.mul(target, 1 - smoothing), smoothing / logs.shape[1])
    each = aten.mul(logs, target)
    each = aten.neg(each if shares is None else aten.mul(each, shares))
    if reduction == MEAN:
        return aten.div(aten.sum(each), logs.tensor.numel() // logs.shape[1])
    return aten.sum(each, [1] if reduction == 0 else None)


@decomposed("ctc_loss")
def ctc_loss(eqn: Equation) -> object:
    return written_out(*eqn.bound()[0])


@rule("tessera.ctc_loss tessera.ctc_grads")
def ctc_losses(eqn: Equation) -> Factors | None:
    """Sequences may be cut, where their targets are not one after the other. What pads them would have no length, so
    they are cut evenly or not at all."""
    logs, targets, *_ = eqn.inputs()
    each, logs_ = ("n", "one"), (("t",), ("n", "one"), ("c",))
    if targets.ndim != 2:
        return None
    operands = logs_, (each, ("s",)), (each,), (each,)
    results = ((each,), logs_)[: len(eqn.outputs)]
    return Factors(operands, results, whole=frozenset("tcs"), sizes={"n": logs.shape[1], "one": 1})
