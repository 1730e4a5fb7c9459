"""Derivatives and batching of functions that bring a derivative of their own.

Reverse mode puts the user's forward and backward in place; forward mode uses the user's rule, or transposes the
backward, which is linear in its cotangent; batching maps the sub-traces and sums what the examples share.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from tessera.ir.builder import Builder, aten
from tessera.ir.equation import Arg, Value
from tessera.ir.trace import Trace
from tessera.ir.types import Size, Type
from tessera.ops.custom import AUTOGRAD_FUNCTION, CUSTOM_VJP, Deferred, backward_of
from tessera.ops.op import declare
from tessera.transforms.jvp import Pushed
from tessera.transforms.subtrace import (
    Values,
    active_mode,
    batch_type,
    emit,
    filled,
    floats,
    plain_type,
    pull,
    randomness,
    rows,
    splice,
    sub_trace,
    types_of,
    zeros,
)


def _custom_forward(
    need: object, primal: Trace, fwd: Trace, bwd: Trace, *operands: Value
) -> Generator[list[Arg], object, tuple]:
    outs = splice(fwd, operands)
    results, residuals = outs[: len(primal.outputs)], outs[len(primal.outputs) :]
    given = yield results
    cts = given if isinstance(given, list) else [given]
    seeds = [filled(ct, v) for ct, v in zip(cts, results, strict=True) if floats(v)]  # type: ignore[arg-type]
    return (None, None, None, *splice(bwd, [*residuals, *seeds]))


def _custom_jvp(ts: Sequence, y: list, primal: Trace, fwd: Trace, bwd: Trace, *operands: Value) -> Pushed:
    """The user gave only the transpose; it is linear in the cotangent, so transposing it gives the tangent."""
    outs = splice(fwd, operands)
    results, residuals = outs[: len(primal.outputs)], outs[len(primal.outputs) :]
    return Pushed(results, _transposed(bwd, residuals, results, ts[3:]))  # type: ignore[arg-type]


def _transposed(bwd: Trace, residuals: Values, results: Values, tangents: Sequence) -> list[Value | None]:
    """The tangents of the results: a backward, linear in its cotangents, turned round."""
    seeds = [zeros(v.tensor) for v in results if floats(v)]
    moving = [t if floats(g) else None for t, g in zip(tangents, bwd.outputs, strict=True)]
    wrt = [False] * len(residuals) + [True] * len(seeds)
    grads = iter(pull(bwd, [*residuals, *seeds], moving, wrt)[len(residuals) :])
    return [next(grads) if floats(v) else None for v in results]


def _custom_batch(size: Size, on: list, primal: Trace, fwd: Trace, bwd: Trace, *operands: Value) -> list[Value]:
    flags = [bool(b) for b in on[3:]]
    types = types_of(operands)
    new_primal = sub_trace(primal.name, types, lambda *xs: rows(primal, flags, xs, size))
    new_fwd = sub_trace(fwd.name, types, lambda *xs: rows(fwd, flags, xs, size))

    count = len(primal.outputs)
    seeds = [batch_type(v.type, size) for v in fwd.outputs[:count] if floats(v)]  # type: ignore[union-attr]
    new_bwd = _batched(bwd, [*types_of(new_fwd.outputs[count:]), *seeds], [], flags, size)
    return emit(CUSTOM_VJP, new_primal, new_fwd, new_bwd, *operands, types=types_of(new_primal.outputs))


def _batched(bwd: Trace, types: Sequence[Type], on: Sequence[bool], flags: Sequence[bool], size: Size) -> Trace:
    """A backward over a batch: `on` says which of its first inputs carry it, the others do. An operand that all
    examples share gets the sum of what they give."""

    def backward(*xs: Value) -> list[Arg]:
        grads = rows_or_none(bwd, [*on, *[True] * (len(xs) - len(on))], xs, size)
        return [g if g is None or b else aten.sum(g, [0]) for g, b in zip(grads, flags, strict=True)]

    return sub_trace(bwd.name, types, backward)


def rows_or_none(trace: Trace, on: Sequence[bool], operands: Values, size: Size) -> list[Arg]:
    """`rows` of a sub-trace some of whose outputs are not there."""
    there = trace.with_(outputs=tuple(o for o in trace.outputs if isinstance(o, Value)))
    batched = iter(rows(there, on, operands, size))
    return [next(batched) if isinstance(o, Value) else o for o in trace.outputs]


# --- torch.autograd.Function ------------------------------------------------------------------------------


def _function_forward(
    need: Sequence[object],
    results: int,
    fwd: Trace,
    bwd: Trace | Deferred,
    push_: Trace | Deferred | None,
    rows_: Callable[..., Trace] | None,
    *operands: Value,
) -> Generator[list[Value], object, tuple]:
    """The equation stays one: differentiated again, it is the function's own backward that is used again."""
    y = emit(AUTOGRAD_FUNCTION, results, fwd, bwd, push_, rows_, *operands, types=types_of(fwd.outputs))
    received = yield y
    received = received if isinstance(received, list) else [received]
    cts, of_saved = received[:results], received[results:]
    given = tuple(ct is not None for ct in cts)
    nothing = (None,) * (_HEAD + len(operands))
    if not any(given) and any(ct is not None for ct in of_saved):
        return nothing
    chosen = backward_of(bwd, tuple(bool(n) for n in need[_HEAD:]), given)
    seeds = [filled(ct, v) for ct, v in zip(cts, y[:results], strict=True) if floats(v)]
    return (*nothing[:_HEAD], *splice(chosen, [*operands, *y, *seeds]))  # type: ignore[arg-type]


_HEAD = 5  # arguments of the equation before its operands


def _function_jvp(
    ts: Sequence,
    y: list,
    results: int,
    fwd: Trace,
    bwd: Trace | Deferred,
    push_: Trace | Deferred | None,
    rows_: Callable[..., Trace] | None,
    *operands: Value,
) -> list:
    moving = ts[_HEAD:]
    saved = [None] * (len(y) - results)  # what the function saved moves with nothing, as in PyTorch
    if push_ is not None:
        tangents = [filled(t, a) for t, a in zip(moving, operands, strict=True) if floats(a)]
        chosen = push_() if isinstance(push_, Deferred) else push_
        return [*splice(chosen, [*operands, *tangents]), *saved]
    chosen = backward_of(bwd, tuple(t is not None for t in moving), (True,) * results)
    return [*_transposed(chosen, [*operands, *y], y[:results], moving), *saved]  # type: ignore[arg-type]


def _function_batch(
    size: Size,
    on: list,
    results: int,
    fwd: Trace,
    bwd: Trace | Deferred,
    push_: Trace | Deferred | None,
    rows_: Callable[..., Trace] | None,
    *operands: Value,
) -> list[Value]:
    flags = tuple(bool(b) for b in on[_HEAD:])
    types = types_of(operands)
    if rows_ is not None:  # the function says itself how it is batched; what it saved beside its results does not
        own = splice(rows_(size, flags, tuple(types), randomness()), operands)
        saved = rows(fwd.with_(outputs=fwd.outputs[results:]), flags, operands, size) if fwd.outputs[results:] else []
        return [*own, *saved]  # type: ignore[list-item]
    new_fwd = sub_trace(fwd.name, types, lambda *xs: rows(fwd, flags, xs, size))
    seeds = [batch_type(v.type, size) for v in fwd.outputs[:results] if floats(v)]  # type: ignore[union-attr]

    def batched(one: Trace) -> Trace:
        return _batched(one, [*types, *types_of(new_fwd.outputs), *seeds], flags, flags, size)

    def batched_push(one: Trace) -> Trace:
        moving = [b for b, a in zip(flags, operands, strict=True) if floats(a)]
        tangents = [plain_type(a.tensor) for a in operands if floats(a)]
        return sub_trace(one.name, [*types, *tangents], lambda *xs: rows_or_none(one, [*flags, *moving], xs, size))

    new_bwd, new_push = _mapped(bwd, batched), None if push_ is None else _mapped(push_, batched_push)
    call = AUTOGRAD_FUNCTION, results, new_fwd, new_bwd, new_push, None, *operands
    return emit(*call, types=types_of(new_fwd.outputs))  # type: ignore[arg-type]


def _mapped(sub: Trace | Deferred, change: Callable[[Trace], Trace]) -> Trace | Deferred:
    """The sub-trace changed, when it is asked for if that is when it is made."""
    if isinstance(sub, Trace):
        return change(sub)
    mode = active_mode()

    def make(*question: object) -> Trace:
        with Builder(sub.name, mode):
            return change(sub(*question))

    return Deferred(sub.name, make)


declare("tessera.custom_vjp", "custom", forward=_custom_forward, jvp=_custom_jvp, batch=_custom_batch, real=False)
declare(
    "tessera.autograd_function",
    "custom",
    forward=_function_forward,
    jvp=_function_jvp,
    batch=_function_batch,
    real=False,
)
