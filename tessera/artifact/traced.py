"""What an artifact's program calls where somebody traces it: to compile it on this machine, or to export it again.

In: an operator of a program. Out: what runs it. Tessera's control flow, run on fake tensors, only says which types come
out; whoever traces must see PyTorch's own, or a program would keep one branch, and one turn of a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tessera.artifact.read import bind
from tessera.ir.check import KINDS, RAISE_IF
from tessera.ir.equation import Special
from tessera.torch_internals.fake import FakeTensor


def bind_traced(op: object) -> Callable:
    """Real tensors run as ever."""
    run = bind(op)
    traced = _TRACED.get(op.name) if isinstance(op, Special) else None
    if traced is None:
        return run

    def call(*args: object) -> object:
        return (traced if any(isinstance(a, FakeTensor) for a in args) else run)(*args)

    return call


def _cond(pred: torch.Tensor, true: Callable, false: Callable, *operands: object) -> list:
    return list(torch.ops.higher_order.cond(pred, true, false, operands))


def _while_loop(test: Callable, body: Callable, carried: int, *operands: object) -> list:
    def holds(*values: object) -> object:
        return test(*values)[0]

    return list(torch.ops.higher_order.while_loop(holds, body, operands[:carried], operands[carried:]))


def _scan(body: Callable, carried: int, sliced: int, reverse: bool, *operands: torch.Tensor) -> list:
    """PyTorch's operator goes forwards alone."""
    end = carried + sliced
    init, xs, rest = list(operands[:carried]), operands[carried:end], operands[end:]
    outs = list(torch.ops.higher_order.scan(body, init, _turned(xs, reverse), rest))
    return [*outs[:carried], *_turned(outs[carried:], reverse)]


def _turned(xs: Sequence[torch.Tensor], reverse: bool) -> list[torch.Tensor]:
    return [x.flip(0) for x in xs] if reverse else list(xs)


def _raise_if(asked: torch.Tensor, answer: bool, message: str, kind: str) -> tuple:
    if bool(asked) == answer:  # a question that a recording answers, and others refuse
        raise KINDS[kind](message)
    return ()


_TRACED = {"cond": _cond, "while_loop": _while_loop, "scan": _scan, RAISE_IF.name: _raise_if}
