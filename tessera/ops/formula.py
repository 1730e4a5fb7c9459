"""PyTorch's formulas called from inside a rule.

A rule that covers the common calls of an operator hands the others on to the functions here, which trace
PyTorch's derivative or batching of that one call (see `fallback`) and put its equations where the rule
stands. The operator may be a `Special` around a Python function: that is how a rule says "differentiate this
composition instead", for kernels whose derivative PyTorch does not have.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.equation import ACTIVE, Arg, Equation, Operator, Special, Value
from tessera.ir.schema import normalise
from tessera.ir.types import TensorType
from tessera.ops.fallback import batch_formula, conform, jvp_formula, vjp_formula
from tessera.util.errors import RuleError

Rule = Generator[object, object, tuple]


def pytorch_vjp(need: Sequence[object], op: Operator, *args: Arg, **kwargs: Arg) -> Rule:
    """The `forward` form of a rule, by PyTorch's formula of this call. `need[i]` asks for `args[i]`."""
    builder, eqn = _call(op, args, kwargs)
    wanted = [a for a, n in zip(args, need, strict=False) if n is True and isinstance(a, Value)]
    formula = vjp_formula(eqn, wanted, builder.mode, again=builder.again)
    trace, values = formula.trace, list(dict.fromkeys(eqn.inputs()))
    primals, seeds = trace.inputs[: len(values)], trace.inputs[len(values) :]
    ahead = trace.equations[: formula.split]
    kept = [v for e in ahead for v in e.results()]
    first = trace.with_(inputs=primals, equations=ahead, outputs=(*kept, *trace.outputs[: formula.results]))
    ahead_values = builder.inline(first, tuple(values))
    results = ahead_values[len(kept) :]
    cts = yield results if eqn.many else results[0]
    given = iter(cts if isinstance(cts, list) else [cts])
    pulled = [(v, next(given)) for v in eqn.results()]
    asked = [(v, ct) for v, ct in pulled if v.is_differentiable]
    heads = [
        conform(ct, like.tensor) if isinstance(ct, Value) else _zeros(v, builder)
        for (v, ct), like in zip(asked, seeds, strict=True)
    ]
    behind = trace.equations[formula.split :]
    second = trace.with_(inputs=(*primals, *kept, *seeds), equations=behind, outputs=trace.outputs[formula.results :])
    grads = builder.inline(second, [*values, *ahead_values[: len(kept)], *heads])
    grad_of = dict(zip(dict.fromkeys(wanted), grads, strict=True))
    return tuple(grad_of.get(a) if isinstance(a, Value) else None for a in args)


def finish(rule: Rule, ct: object) -> tuple:
    """Send a rule that has yielded its result the cotangent, for its gradients."""
    try:
        rule.send(ct)
    except StopIteration as stop:
        return stop.value
    raise RuleError("a forward rule yields its result once")


def pytorch_jvp(op: Operator, ts: Sequence[Value | None], *args: Arg, **kwargs: Arg) -> list[Value | None]:
    """The tangents of the results of this call, by PyTorch's forward mode. `ts[i]` belongs to `args[i]`."""
    builder, eqn = _call(op, args, kwargs)
    moving = {a: t for a, t in zip(args, ts, strict=False) if t is not None and isinstance(a, Value)}
    formula = jvp_formula(eqn, list(moving), builder.mode)
    values = list(dict.fromkeys(eqn.inputs()))
    given = formula.trace.inputs[len(values) :]
    moved = [v for v in values if v in moving]
    tangents = [conform(moving[v], like.tensor) for v, like in zip(moved, given, strict=True)]
    out = builder.inline(formula.trace, [*values, *tangents])
    return out[formula.results :]  # type: ignore[return-value]


def pytorch_batch(op: Operator, on: Sequence[object], *args: Arg, **kwargs: Arg) -> object:
    """This call over a batch, by PyTorch's vmap; args[i] carries the batch at dimension 0 iff on[i]."""
    rows = [_row(a) if b and isinstance(a, Value) else a for a, b in zip(args, on, strict=False)]
    batched = {r: a.tensor for r, a in zip(rows, args, strict=False) if r is not a and isinstance(a, Value)}
    builder, eqn = _call(op, tuple(rows), kwargs)
    formula = batch_formula(eqn, batched, builder.mode)  # type: ignore[arg-type]
    back = {r: a for r, a in zip(rows, args, strict=False) if isinstance(r, Value)}
    values = [back.get(v, v) for v in dict.fromkeys(eqn.inputs())]
    rows_of = iter(builder.inline(formula.trace, values))
    out = [None if v is None else next(rows_of) for v in eqn.outputs]
    return out if eqn.many else out[0]


def _call(op: Operator, args: tuple, kwargs: dict) -> tuple[Builder, Equation]:
    """The call as an equation that stands nowhere: only its types matter."""
    builder: Builder = ACTIVE[-1]  # type: ignore[assignment]
    if not isinstance(op, Special):
        args, kwargs = normalise(op, args, kwargs)
    types = fake.infer(op, args, kwargs, builder.mode)
    listed = types if isinstance(types, list) else [types]
    outputs = tuple(None if t is None else Value(f"y{i}", t) for i, t in enumerate(listed))  # type: ignore[arg-type]
    return builder, Equation(op, args, kwargs, outputs, fake.is_many(types))


def _row(a: Value) -> Value:
    t = a.tensor
    return Value(a.name, TensorType(t.dtype, t.shape[1:], t.stride[1:], t.device, t.layout))


def _zeros(like: Value, builder: Builder) -> Arg:
    return builder.call("zeros", list(like.shape), dtype=like.dtype, device=like.tensor.device)
