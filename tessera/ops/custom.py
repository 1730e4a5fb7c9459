"""Functions with a derivative of their own, as `Special`s over sub-traces.

A sub-trace is a program with no constants, whose inputs are the equation's operands. Here stands what the equations
are and how they run: where eager autograd looks on, it is given the function's own backward. Their derivatives and
batching, which transform the sub-traces, stand in `transforms/custom`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tessera.ir.call import Sub, runnable
from tessera.ir.equation import ACTIVE, Special, Value
from tessera.ir.replay import callables
from tessera.ir.trace import Trace
from tessera.ir.types import Size
from tessera.ops.op import declare
from tessera.torch_internals.autograd import DelayedError
from tessera.torch_internals.dispatch import DispatchKey, is_key_excluded
from tessera.torch_internals.fake import FakeTensor
from tessera.util.errors import DoubleBackwardError

Flags = tuple[bool, ...]


class Deferred:
    """A sub-trace that is made when it is asked for, once for every question.

    A backward may look at which gradients are wanted and which cotangents there are (`needs_input_grad`,
    `set_materialize_grads`), or be one that cannot be traced, which matters only if somebody differentiates.
    """

    def __init__(self, name: str, make: Callable[..., Trace]) -> None:
        self.name, self.make = name, make
        self.answers: dict[object, Trace] = {}

    def __call__(self, *question: object) -> Trace:
        if question not in self.answers:
            self.answers[question] = self.make(*question)
        return self.answers[question]


def backward_of(bwd: Sub | Deferred, needs: Flags, given: Flags) -> Sub:
    """The backward for the operands that need a gradient and the results that have a cotangent."""
    return bwd(needs, given) if isinstance(bwd, Deferred) else bwd


def types_only(operands: Sequence[object]) -> bool:
    """Nothing is computed, only types are asked for: every sub-trace is called, as the derivatives will call it."""
    return any(isinstance(x, FakeTensor) for x in operands)


def _watched(operands: Sequence[object]) -> bool:
    """Eager autograd notes what is computed from these: not in a compiled program, which runs below it."""
    if not torch.is_grad_enabled() or is_key_excluded(DispatchKey.AutogradFunctionality):
        return False
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in operands)


def is_float(x: object) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _seeds(xs: Sequence) -> list[torch.Tensor]:
    """Stand-ins for cotangents or tangents, which are contiguous."""
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs if is_float(x)]


def _filled(cts: Sequence, like: Sequence) -> list[torch.Tensor]:
    """One contiguous cotangent for every result that floats; zeros where there is none."""
    pairs = [(ct, x) for ct, x in zip(cts, like, strict=True) if is_float(x)]
    return [torch.zeros_like(x).contiguous() if ct is None else ct.contiguous() for ct, x in pairs]


def _separate(outs: Sequence, operands: Sequence) -> tuple:
    """Autograd wants results that are not arguments."""
    return tuple(x.view_as(x) if any(x is a for a in operands) else x for x in outs)


# --- custom_vjp -------------------------------------------------------------------------------------------


class _CustomVjp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, count: int, fwd: Callable, bwd: Callable, *operands: torch.Tensor) -> tuple:  # noqa: ANN001
        outs = _separate(fwd(*operands), operands)
        ctx.count, ctx.bwd = count, bwd
        ctx.save_for_backward(*outs)
        ctx.mark_non_differentiable(*outs[count:], *(x for x in outs[:count] if not is_float(x)))
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    def backward(ctx, *cts: torch.Tensor | None) -> tuple:  # noqa: ANN001
        outs, count = ctx.saved_tensors, ctx.count
        return (None, None, None, *ctx.bwd(*outs[count:], *_filled(cts[:count], outs[:count])))


def _custom_vjp(primal: Sub, fwd: Sub, bwd: Sub, *operands: object) -> list:
    if types_only(operands):
        outs = list(runnable(primal)(*operands))
        residuals = runnable(fwd)(*operands)[len(outs) :]
        runnable(bwd)(*residuals, *_seeds(outs))
        return outs
    if _watched(operands):
        count = len(_outputs(primal, operands))
        return list(_CustomVjp.apply(count, runnable(fwd), runnable(bwd), *operands))[:count]  # type: ignore[call-overload]
    return list(runnable(primal)(*operands))


def _outputs(sub: Sub, operands: Sequence[object]) -> Sequence:
    with torch.no_grad():
        return sub.outputs if isinstance(sub, Trace) else sub(*operands)


# custom_vjp(primal, fwd, bwd, *operands): primal(operands); `fwd` gives results and residuals, `bwd` takes
# residuals and cotangents and gives one gradient (or None) an operand.
CUSTOM_VJP = Special("custom_vjp", _custom_vjp)


# --- torch.autograd.Function ------------------------------------------------------------------------------


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, results: int, fwd: Callable, bwd: Sub | Deferred, *operands: torch.Tensor) -> tuple:  # noqa: ANN001
        outs = _separate(fwd(*operands), operands)
        ctx.results, ctx.bwd, ctx.count = results, bwd, len(operands)
        ctx.save_for_backward(*operands, *outs)
        ctx.mark_non_differentiable(*outs[results:], *(x for x in outs[:results] if not is_float(x)))
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    def backward(ctx, *cts: torch.Tensor | None) -> tuple:  # noqa: ANN001
        operands, outs = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        given = tuple(ct is not None for ct in cts[: ctx.results])
        bwd = callables(backward_of(ctx.bwd, tuple(ctx.needs_input_grad[3:]), given))
        seeds = _filled(cts[: ctx.results], outs[: ctx.results])
        return (None, None, None, *bwd(*operands, *outs, *seeds))  # type: ignore[operator]


def _autograd_function(
    results: int, fwd: Sub, bwd: Sub | Deferred, push: Sub | None, rows: Callable | None, *operands: object
) -> list:
    if not types_only(operands) and _watched(operands):
        return list(_Function.apply(results, runnable(fwd), bwd, *operands))  # type: ignore[call-overload]
    outs = list(runnable(fwd)(*operands))
    if types_only(operands):
        if not isinstance(bwd, Deferred):
            runnable(bwd)(*operands, *outs, *_seeds(outs[:results]))
        if push is not None and not isinstance(push, Deferred):
            runnable(push)(*operands, *_seeds(operands))
    return outs


# autograd_function(results, fwd, bwd, push, rows, *operands): fwd(operands), of which the first `results` are the
# function's and the others what it saved; `bwd` takes (operands, all of those, cotangents of the results), `push`
# (operands, tangents), `rows` (operands, some of which carry a batch), where the function says how it is batched.
AUTOGRAD_FUNCTION = Special("autograd_function", _autograd_function)


# --- a gradient that may not be differentiated again --------------------------------------------------------

_TWICE = "trying to differentiate twice a function that was marked with @once_differentiable"


def _once(g: torch.Tensor, *read: torch.Tensor) -> torch.Tensor:
    """`g` itself; autograd that looks on is told that there is no derivative of it."""
    if _watched(read) and not types_only(read):
        return DelayedError(_TWICE.encode(), 1)(g.detach().requires_grad_())
    return g.view_as(g)


def _refuse(*_: object, **__: object) -> None:
    raise DoubleBackwardError(_TWICE)


def _once_batch(size: Size, on: Sequence[bool], g: Value, *read: Value) -> Value:
    builder = ACTIVE[-1]
    if not on[0]:
        g = builder.call("expand", builder.call("unsqueeze", g, 0), [size, *g.shape])
    return builder.emit(ONCE, g, *read)  # type: ignore[attr-defined]


# once_differentiable(g, *read): `g`, computed from `read` by a backward that has no derivative.
ONCE = Special("once_differentiable", _once)
declare("tessera.once_differentiable", "custom", vjp=_refuse, jvp=_refuse, batch=_once_batch, real=False)
