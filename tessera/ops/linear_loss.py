"""The last linear layer and cross-entropy as one operator, so that the logits need not be held.

    linear_loss(x, w, bias, target, mean, ignore)        -> loss
    linear_loss_grads(x, w, bias, target, mean, ignore)  -> loss, dx, dw, dbias

x is `(rows, width)`, w `(classes, width)`, target one class a row. A loss is one number, so its gradients are known up
to a factor when it is computed: differentiation turns the first form into the second, which works through the rows in
chunks and keeps dx and dw in place of the logits, and backward only multiplies. `passes/patterns/linear_loss` finds the
first form in a program and writes the second one out.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Equation, Special, Value
from tessera.ops.op import declare


def _loss(x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, mean: bool, ignore: int) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    reduction = "mean" if mean else "sum"
    return F.cross_entropy(F.linear(x, w, bias).to(wide), target, ignore_index=ignore, reduction=reduction)


def _grads(x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, mean: bool, ignore: int) -> list[Tensor | None]:
    z = F.linear(x, w, bias).to(torch.promote_types(x.dtype, torch.float32))
    used = target != ignore
    count = used.sum() if mean else torch.ones((), dtype=torch.int64, device=x.device)
    label = torch.where(used, target, 0)[:, None]
    logs = z.log_softmax(1)
    loss = -torch.where(used[:, None], logs.gather(1, label), 0).sum() / count
    share = logs.exp().scatter_add(1, label, torch.full_like(label, -1, dtype=z.dtype))
    d = torch.where(used[:, None], share / count, 0).to(x.dtype)
    return [loss, d @ w, d.t() @ x, None if bias is None else d.sum(0)]


LINEAR_LOSS = Special("linear_loss", _loss)
LINEAR_LOSS_GRADS = Special("linear_loss_grads", _grads)


def _forward(
    need: Sequence[object], x: Value, w: Value, bias: Value | None, target: Value, mean: bool, ignore: int
) -> Generator[Value, Value, tuple]:
    results = emit(LINEAR_LOSS_GRADS, x, w, bias, target, mean, ignore)
    loss, *grads = results
    ct = yield loss

    def scaled(grad: Value | None, wanted: object) -> Value | None:
        return aten.mul(grad, aten._to_copy(ct, dtype=grad.dtype)) if wanted and grad is not None else None

    return *(scaled(g, n) for g, n in zip(grads, need[:3], strict=True)), None


def _cost(products: int):  # noqa: ANN202
    def cost(eqn: Equation) -> float:
        x, w = eqn.inputs()[:2]
        return products * 2.0 * x.tensor.numel() * w.tensor.numel() / max(w.tensor.numel() // _rows(w), 1)

    return cost


def _rows(v: Value) -> int:
    t = v.tensor
    return max(t.numel() // max(int(t.shape[-1]), 1), 1)


declare("tessera.linear_loss", "loss", forward=_forward, cost=_cost(1))
declare("tessera.linear_loss_grads", "loss", cost=_cost(3))
