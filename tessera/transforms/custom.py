"""Derivatives and batching of functions that bring a derivative of their own.

Reverse mode puts the user's forward and backward in place; forward mode uses the user's rule, or transposes the
backward, which is linear in its cotangent; batching maps the sub-traces and sums what the examples share.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Value
from tessera.ir.trace import Trace
from tessera.ir.types import Size
from tessera.ops.control import AUTOGRAD_FUNCTION, CUSTOM_VJP
from tessera.ops.op import declare
from tessera.transforms.jvp import Pushed
from tessera.transforms.subtrace import (
    Values,
    batch_type,
    emit,
    filled,
    floats,
    plain_type,
    pull,
    rows,
    splice,
    sub_trace,
    types_of,
    zeros,
)


def _custom_forward(
    need: object, primal: Trace, fwd: Trace, bwd: Trace, *operands: Value
) -> Generator[list[Arg], object, tuple]:
    made = splice(fwd, operands)
    results, residuals = made[: len(primal.outputs)], made[len(primal.outputs) :]
    given = yield results
    cts = given if isinstance(given, list) else [given]
    seeds = [filled(ct, v) for ct, v in zip(cts, results, strict=True) if floats(v)]  # type: ignore[arg-type]
    return (None, None, None, *splice(bwd, [*residuals, *seeds]))


def _custom_jvp(ts: Sequence, y: list, primal: Trace, fwd: Trace, bwd: Trace, *operands: Value) -> Pushed:
    """The user gave only the transpose; it is linear in the cotangent, so transposing it gives the tangent."""
    made = splice(fwd, operands)
    results, residuals = made[: len(primal.outputs)], made[len(primal.outputs) :]
    seeds = [zeros(v.tensor) for v in results if floats(v)]  # type: ignore[union-attr]
    tangents = [t if floats(g) else None for t, g in zip(ts[3:], bwd.outputs, strict=True)]
    wrt = [False] * len(residuals) + [True] * len(seeds)
    grads = iter(pull(bwd, [*residuals, *seeds], tangents, wrt)[len(residuals) :])  # type: ignore[list-item]
    return Pushed(results, [next(grads) if floats(v) else None for v in results])  # type: ignore[arg-type]


def _custom_batch(size: Size, on: list, primal: Trace, fwd: Trace, bwd: Trace, *operands: Value) -> list[Value]:
    flags = [bool(b) for b in on[3:]]
    types = types_of(operands)
    new_primal = sub_trace(primal.name, types, lambda *xs: rows(primal, flags, xs, size))
    new_fwd = sub_trace(fwd.name, types, lambda *xs: rows(fwd, flags, xs, size))

    def backward(*xs: Value) -> list[Arg]:
        made = rows_or_none(bwd, [True] * len(xs), xs, size)
        # an operand all examples share gets the sum of what they give
        return [g if g is None or b else aten.sum(g, [0]) for g, b in zip(made, flags, strict=True)]

    seeds = [batch_type(v.type, size) for v in fwd.outputs[: len(primal.outputs)] if floats(v)]  # type: ignore[union-attr]
    new_bwd = sub_trace(bwd.name, [*types_of(new_fwd.outputs[len(primal.outputs) :]), *seeds], backward)
    return emit(CUSTOM_VJP, new_primal, new_fwd, new_bwd, *operands, types=types_of(new_primal.outputs))


def rows_or_none(trace: Trace, on: Sequence[bool], operands: Values, size: Size) -> list[Arg]:
    """`rows` of a sub-trace some of whose outputs are not there."""
    there = trace.with_(outputs=tuple(o for o in trace.outputs if isinstance(o, Value)))
    made = iter(rows(there, on, operands, size))
    return [next(made) if isinstance(o, Value) else o for o in trace.outputs]


def _function_vjp(cts: list, y: list, results: int, fwd: Trace, bwd: Trace, push_: object, *operands: Value) -> tuple:
    seeds = [filled(ct, v) for ct, v in zip(cts[:results], y[:results], strict=True) if floats(v)]
    if all(ct is None for ct in cts[:results]):
        return (None,) * (4 + len(operands))
    return (None, None, None, None, *splice(bwd, [*operands, *y, *seeds]))


def _function_jvp(
    ts: Sequence, y: list, results: int, fwd: Trace, bwd: Trace, push_: Trace | None, *operands: Value
) -> list:
    moving = ts[4:]
    saved = [None] * (len(y) - results)  # what the function saved moves with nothing, as in PyTorch
    if push_ is not None:
        tangents = [filled(t, a) for t, a in zip(moving, operands, strict=True) if floats(a)]
        return [*splice(push_, [*operands, *tangents]), *saved]
    inputs = [*operands, *y]
    seeds = [zeros(v.tensor) for v in y[:results] if floats(v)]
    tangents = [t if floats(g) else None for t, g in zip(moving, bwd.outputs, strict=True)]
    wrt = [False] * len(inputs) + [True] * len(seeds)
    grads = iter(pull(bwd, [*inputs, *seeds], tangents, wrt)[len(inputs) :])
    return [*(next(grads) if floats(v) else None for v in y[:results]), *saved]


def _function_batch(
    size: Size, on: list, results: int, fwd: Trace, bwd: Trace, push_: Trace | None, *operands: Value
) -> list[Value]:
    flags = [bool(b) for b in on[4:]]
    types = types_of(operands)
    new_fwd = sub_trace(fwd.name, types, lambda *xs: rows(fwd, flags, xs, size))
    seeds = [batch_type(v.type, size) for v in fwd.outputs[:results] if floats(v)]  # type: ignore[union-attr]

    def backward(*xs: Value) -> list[Arg]:
        made = rows_or_none(bwd, [*flags, *[True] * (len(xs) - len(flags))], xs, size)
        return [g if g is None or b else aten.sum(g, [0]) for g, b in zip(made, flags, strict=True)]

    new_bwd = sub_trace(bwd.name, [*types, *types_of(new_fwd.outputs), *seeds], backward)
    new_push = None
    if push_ is not None:
        moving = [b for b, a in zip(flags, operands, strict=True) if floats(a)]
        tangents = [plain_type(a.tensor) for a in operands if floats(a)]
        new_push = sub_trace(
            push_.name, [*types, *tangents], lambda *xs: rows_or_none(push_, [*flags, *moving], xs, size)
        )
    return emit(AUTOGRAD_FUNCTION, results, new_fwd, new_bwd, new_push, *operands, types=types_of(new_fwd.outputs))


declare("tessera.custom_vjp", "custom", forward=_custom_forward, jvp=_custom_jvp, batch=_custom_batch, real=False)
declare("tessera.autograd_function", "custom", vjp=_function_vjp, jvp=_function_jvp, batch=_function_batch, real=False)
