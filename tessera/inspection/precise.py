"""A program in more precision than it was written for: the reference that errors are measured against.

In: a trace and its arguments. Out: what it gives where every floating-point number is a float64 (complex128). Random
equations draw in their own dtype, so that the same numbers come out, and an operator that has no kernel for float64
runs in its own dtype: the reference is as precise as each operator allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tessera.inspection.step import Call, plain
from tessera.ir.alias import KEEP_GRAD
from tessera.ir.equation import NO_GRAD, Arg, Equation, Value
from tessera.ir.replay import _KeepGrad
from tessera.ir.schema import has_effect
from tessera.ir.types import TensorType
from tessera.torch_internals import pytree

WIDER = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex32: torch.complex128, torch.complex64: torch.complex128,
}  # fmt: skip


def widen(tree: Any) -> Any:
    """Tensors and dtypes in float64."""
    return pytree.tree_map(_wide, tree)


def _wide(x: object) -> object:
    if isinstance(x, torch.Tensor):
        return x.to(WIDER[x.dtype]) if x.dtype in WIDER else x
    return WIDER.get(x, x) if isinstance(x, torch.dtype) else x


def narrow(written: Arg, value: object) -> object:
    """Arguments in the dtypes that the equation was written for."""
    if isinstance(written, Value):
        keep = isinstance(written.type, TensorType) and isinstance(value, torch.Tensor)
        return value.to(written.type.dtype) if keep else value  # type: ignore[union-attr]
    if isinstance(written, (list, tuple)):
        return type(written)(narrow(w, g) for w, g in zip(written, value, strict=True))  # type: ignore[call-overload]
    if isinstance(written, dict):
        return {key: narrow(w, value[key]) for key, w in written.items()}  # type: ignore[index]
    return value


def precisely(eqn: Equation, args: tuple, kwargs: dict) -> object:
    """Run one equation in float64 where that can be done."""
    if not has_effect(eqn):
        try:
            return widen(plain(eqn, widen(args), widen(kwargs)))
        except Exception:  # no such kernel: whatever an operator raises then
            pass
    return widen(plain(eqn, narrow(eqn.args, args), narrow(eqn.kwargs, kwargs)))  # type: ignore[arg-type]


def differentiably(call: Call) -> Call:
    """With eager autograd looking on, as it looks on the user's own program."""

    def run(eqn: Equation, args: tuple, kwargs: dict) -> object:
        if eqn.op is KEEP_GRAD:
            return _KeepGrad.apply(*args[:2])
        with torch.set_grad_enabled(NO_GRAD not in eqn.tags):
            return call(eqn, args, kwargs)

    return run


def gradients(
    outputs: Sequence[object], wrt: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The gradients of all differentiable outputs together, each with its cotangent."""
    pulled = [
        (o, s.to(o.dtype))
        for o, s in zip(outputs, seeds, strict=True)
        if isinstance(o, torch.Tensor) and o.requires_grad and s is not None
    ]
    if not pulled or not wrt:
        return [None] * len(wrt)
    outs, cts = zip(*pulled, strict=True)
    return list(torch.autograd.grad(outs, wrt, cts, allow_unused=True))
