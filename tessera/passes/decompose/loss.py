"""Losses written out; those of classes as a row's maximum and sum of exponentials, and the logit of its class.

Rules are as in `decompose_nn`. Those of `FROM_LOGITS` are also given who made each value: the logarithm of a softmax at
one class a row is taken from the logits there, so that nobody needs the whole of it. On a CPU, where PyTorch checks
classes and a kernel cannot raise, that one logit a row is read outside of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Equation, Special, Value
from tessera.ops.families import cast, product
from tessera.passes.decompose import nn
from tessera.passes.decompose.nn import Results, out, rule, wide
from tessera.torch_internals.fake import FakeTensor
from tessera.torch_internals.operators import OpOverload, op_name

Makers = Mapping[Value, Equation]
FROM_LOGITS: dict[str, Callable[..., Results]] = {}
NONE, MEAN, SUM = 0, 1, 2  # reductions, as PyTorch numbers them


def _class_logit(x: torch.Tensor, target: torch.Tensor, ignored: int) -> torch.Tensor:
    """x[row, target[row]], and x[row, 0] where the target is ignored; another target raises as PyTorch's losses do."""
    safe = torch.where(target != ignored, target, 0)
    if not isinstance(x, FakeTensor) and target.numel():
        low, high = torch.aminmax(safe)
        if low < 0 or high >= x.shape[1]:
            raise IndexError(f"Target {int(low) if low < 0 else int(high)} is out of bounds.")
    return x.gather(1, safe.unsqueeze(1)).squeeze(1)


CLASS_LOGIT = Special("class_logit", _class_logit)


def _at_class(x: Value, target: Value, ignored: int) -> Value:
    """The logit of every row's class, in single precision at least."""
    if x.tensor.device.type == "cpu":
        return wide(emit(CLASS_LOGIT, x, target, ignored))
    return aten.squeeze(aten.gather(wide(x), 1, aten.unsqueeze(_safe(target, ignored)[1], 1)), 1)


def _safe(target: Value, ignored: int) -> tuple[Value, Value]:
    """Which rows count, and a class of each that is always there."""
    counts = aten.ne(target, ignored)
    return counts, aten.where(counts, target, aten.zeros_like(target))


def _is_plain(logs: Value, target: Value) -> bool:
    return logs.ndim == 2 and target.ndim == 1 and not target.tensor.is_float


def _log_at_class(x: Value, target: Value, ignored: int) -> Value:
    """The logarithm of the softmax at every row's class."""
    top, _, log = _row_sums(x)
    return aten.sub(aten.sub(_at_class(x, target, ignored), aten.squeeze(top, 1)), aten.squeeze(log, 1))


def _row_sums(x: Value) -> tuple[Value, Value, Value]:
    """Every row's maximum, what is left after it, and the logarithm of the sum of that one's exponentials."""
    x = wide(x)
    top = aten.amax(x, [1], True)
    left = aten.sub(x, top)
    return top, left, aten.log(aten.sum(aten.exp(left), [1], True))


def _reduced(
    eqn: Equation, loss: Value, target: Value, weight: Value | None, reduction: int, ignored: int
) -> list[Value | None]:
    """The loss and its total weight, from what every row loses."""
    counts, safe = _safe(target, ignored)
    share = None if weight is None else aten.index_select(wide(weight), 0, safe)
    loss = loss if share is None else aten.mul(loss, share)
    loss = aten.where(counts, loss, aten.zeros_like(loss))
    if reduction == NONE:
        return [out(eqn, 0, loss), out(eqn, 1, aten.full([], 0.0, dtype=loss.dtype, device=loss.tensor.device))]
    ones = cast(counts, loss.dtype) if share is None else aten.where(counts, share, aten.zeros_like(share))
    total, sums = aten.sum(ones), aten.sum(loss)
    return [out(eqn, 0, sums if reduction == SUM else aten.div(sums, total)), out(eqn, 1, total)]


def nll_loss_forward(
    makers: Makers, eqn: Equation, logs: Value, target: Value, weight: Value | None, reduction: int, ignored: int
) -> Results:
    if not _is_plain(logs, target):
        return None
    source = makers.get(logs)
    x = None if source is None else _logits_of(source)
    at_class = _at_class(logs, target, ignored) if x is None else _log_at_class(x, target, ignored)
    return _reduced(eqn, aten.neg(at_class), target, weight, reduction, ignored)


def _logits_of(eqn: Equation) -> Value | None:
    """What a log-softmax over classes was taken of, if in the dtype of its result."""
    op = eqn.op
    if not isinstance(op, OpOverload) or op_name(op) not in ("_log_softmax", "log_softmax"):
        return None
    x, dim, *option = eqn.args
    same = isinstance(x, Value) and x.dtype == eqn.results()[0].dtype and not any(option)
    return x if same and x.ndim == 2 and dim in (1, -1) else None  # type: ignore[union-attr]


FROM_LOGITS["nll_loss_forward"] = nll_loss_forward


@rule("nll_loss_backward")
def nll_loss_backward(
    eqn: Equation,
    g: Value,
    logs: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignored: int,
    total: Value,
) -> Results:
    if not _is_plain(logs, target):
        return None
    rows, nothing = _at_classes(g, target, weight, reduction, ignored, total)
    classes = aten.arange(logs.shape[1], device=logs.tensor.device)
    hit = aten.eq(classes, aten.unsqueeze(target, 1))
    return [out(eqn, 0, aten.where(hit, rows, nothing))]


def _at_classes(
    g: Value, target: Value, weight: Value | None, reduction: int, ignored: int, total: Value
) -> tuple[Value, Value]:
    """What a loss gives back at the class of every row, as a column; and the zero that it gives elsewhere."""
    counts, safe = _safe(target, ignored)
    g = aten.div(wide(g), wide(total)) if reduction == MEAN else wide(g)
    rows = aten.neg(g) if weight is None else aten.mul(aten.neg(g), aten.index_select(wide(weight), 0, safe))
    nothing = aten.full([], 0.0, dtype=rows.dtype, device=rows.tensor.device)
    return aten.unsqueeze(aten.where(counts, rows, nothing), 1), nothing


def log_softmax_backward(makers: Makers, eqn: Equation, g: Value, y: Value, dim: int, dtype: torch.dtype) -> Results:
    """A row of which a loss gives one class back is not summed: the sum is what it gives there."""
    loss = makers.get(g)
    if loss is None or loss.opname != "nll_loss_backward" or dim not in (1, -1):
        return nn.log_softmax_backward(eqn, g, y, dim, dtype)
    cotangent, logs, target, weight, reduction, ignored, total = loss.bound()[0]
    if not _is_plain(logs, target):  # type: ignore[arg-type]
        return nn.log_softmax_backward(eqn, g, y, dim, dtype)
    rows, _ = _at_classes(cotangent, target, weight, reduction, ignored, total)  # type: ignore[arg-type]
    return [out(eqn, 0, nn.less_share(wide(g), y, wide(cast(rows, g.dtype))))]


FROM_LOGITS["_log_softmax_backward_data"] = log_softmax_backward


@rule("smooth_l1_loss_backward")
def smooth_l1_loss_backward(eqn: Equation, g: Value, x: Value, target: Value, reduction: int, beta: float) -> Results:
    """What is neither below nor above is in between, NaN included; PyTorch writes a sign, which is zero of NaN."""
    left = aten.sub(wide(x), wide(target))
    g = aten.div(wide(g), product(x.shape)) if reduction == MEAN else wide(g)
    above = aten.where(aten.ge(left, beta), g, aten.div(aten.mul(g, left), beta))
    return [out(eqn, 0, aten.where(aten.le(left, -beta), aten.neg(g), above))]


@rule("cross_entropy_loss")
def cross_entropy(
    eqn: Equation, x: Value, target: Value, weight: Value | None, reduction: int, ignored: int, smoothing: float
) -> Results:
    if not _is_plain(x, target) or not isinstance(ignored, int) or (smoothing and weight is not None):
        return None
    both = eqn.with_(outputs=(*eqn.outputs, None))
    loss = aten.neg(_log_at_class(x, target, ignored))
    if smoothing:  # (1 - s) of the class's own loss, and s of the mean over all classes
        _, left, log = _row_sums(x)
        everyone = aten.sub(log, aten.mean(left, [1], True))
        loss = aten.add(aten.mul(loss, 1 - smoothing), aten.mul(aten.squeeze(everyone, 1), smoothing))
    return _reduced(both, loss, target, weight, reduction, ignored)[:1]
