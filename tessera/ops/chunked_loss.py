"""PyTorch's own chunked linear cross-entropy (`linear_cross_entropy(options=…)`), where it is differentiated again.

Its operators compute gradients beside the loss, for the operands that required grad when the program was written down,
and those gradients carry no derivative. A gradient that is wanted once, in a compiled program, is PyTorch's formula.
In a transform, which may stand inside another, it is that of the linear layer and the loss written out.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Special, Value
from tessera.ops.families import differentiated_again
from tessera.ops.formula import finish, pytorch_jvp, pytorch_vjp
from tessera.ops.op import declare

OPERANDS = 5  # input, weight of the layer, target, bias, weights of the classes


def _written_out(
    x: Tensor, w: Tensor, target: Tensor, bias: Tensor | None, share: Tensor | None, reduction: str, ignore: int
) -> Tensor:
    logits = F.linear(x, w.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return F.cross_entropy(logits, target, share, ignore_index=ignore, reduction=reduction)


WRITTEN_OUT = Special("linear_cross_entropy", _written_out)


def _declare(name: str, reduced: bool) -> None:
    """`reduced`: the operator gives a number, and the three gradients that it computes beside it."""

    def plain(args: Sequence[Arg]) -> tuple[Arg, ...]:
        """The arguments that say what is computed, not how."""
        return tuple(args[: OPERANDS + 2]) if reduced else (*args[:OPERANDS], "none", args[OPERANDS])

    def forward(need: Sequence[object], *args: Arg) -> Generator[object, object, tuple]:
        if not differentiated_again():
            return (yield from pytorch_vjp(need, getattr(torch.ops.torch_nn, name).default, *args))
        rule = pytorch_vjp(need[:OPERANDS], WRITTEN_OUT, *plain(args))
        loss = next(rule)
        cts = yield [loss, *_beside(*args)] if reduced else loss  # type: ignore[arg-type]
        grads = finish(rule, cts[0] if isinstance(cts, list) else cts)
        return *grads[:OPERANDS], *(None for _ in args[OPERANDS:])

    def jvp(ts: Sequence[Value | None], y: object, *args: Arg) -> object:
        tangent = pytorch_jvp(WRITTEN_OUT, ts[:OPERANDS], *plain(args))[0]
        return [tangent, None, None, None] if reduced else tangent

    declare(f"torch_nn.{name}", "loss", forward=forward, jvp=jvp, passive=(1, 2, 3) if reduced else ())


def _beside(x: Value, w: Value, *rest: Arg) -> list[Value]:
    """What nobody reads, in place of the gradients that were asked for."""
    sizes = zip(rest[-3:], (x.shape, w.shape, w.shape[:-1]), ((0, 0), (0, 0), (0,)), strict=True)
    return [
        aten.zeros(list(full if asked else none), dtype=x.dtype, device=x.tensor.device) for asked, full, none in sizes
    ]


_declare("_linear_cross_entropy_batch_chunked", reduced=True)
_declare("_linear_cross_entropy_batch_chunked_no_reduction", reduced=False)
