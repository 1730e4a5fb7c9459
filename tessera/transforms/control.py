"""Derivatives and batching of operators that hold sub-traces: control flow, functions with their own derivative.

Each rule transforms the sub-traces and emits an equation over the results, or puts a sub-trace's equations in
place. A sub-trace has no constants: all it reads are operands, so nothing needs to be carried in by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from tessera.ir.builder import Builder, aten
from tessera.ir.equation import ACTIVE, Arg, Special, Value
from tessera.ir.replay import sweep
from tessera.ir.trace import Trace
from tessera.ir.types import Size, TensorType, Type, size_key
from tessera.ops.control import AUTOGRAD_FUNCTION, COND, CUSTOM_VJP, SCAN, WHILE_LOOP
from tessera.ops.fallback import conform
from tessera.ops.op import declare
from tessera.transforms.jvp import Pushed, inline, jvp
from tessera.transforms.vjp import vjp
from tessera.transforms.vmap import vmap
from tessera.util.errors import RuleError

Values = Sequence[Value]


# --- words ----------------------------------------------------------------------------------------


def _builder() -> Builder:
    return ACTIVE[-1]  # type: ignore[return-value]


def emit(op: Special, *args: Arg, types: Sequence[Type]) -> list[Value]:
    return _builder().record(op, args, {}, list(types))  # type: ignore[return-value]


def splice(trace: Trace, args: Sequence[Arg]) -> list[Arg]:
    """The equations of a sub-trace here, on these arguments, in the layouts it was traced for."""
    fitted = [conform(a, v.tensor) if _is_tensor(a) else a for a, v in zip(args, trace.inputs, strict=True)]  # type: ignore[arg-type]
    return inline(_builder(), trace, fitted)


def sub_trace(name: str, types: Sequence[Type], body: Callable[..., Sequence[Arg]]) -> Trace:
    """A new sub-trace: `body` says what it computes from inputs of these types."""
    builder = Builder(name, _builder().mode)
    builder.again = _builder().again
    inputs = [builder.input(f"x{i}", t) for i, t in enumerate(types)]
    with builder:
        outputs = list(body(*inputs))
    return sweep(builder.finish(outputs))


def _is_tensor(a: object) -> bool:
    return isinstance(a, Value) and isinstance(a.type, TensorType)


def floats(v: Arg) -> bool:
    return isinstance(v, Value) and isinstance(v.type, TensorType) and v.type.is_differentiable


def types_of(values: Sequence[Arg]) -> list[Type]:
    return [v.type for v in values]  # type: ignore[union-attr]


def plain_type(t: TensorType) -> TensorType:
    """The type of a cotangent or a tangent: contiguous, whatever made it."""
    stride: list[Size] = []
    step: Size = 1
    for size in reversed(t.shape):
        stride.insert(0, step)
        step = step * size
    return TensorType(t.dtype, t.shape, tuple(stride), t.device)


def zeros(t: TensorType) -> Value:
    return aten.zeros(list(t.shape), dtype=t.dtype, device=t.device)


def filled(t: Arg | None, like: Value) -> Value:
    """A tangent or cotangent that is there, contiguous."""
    return zeros(like.tensor) if t is None else conform(t, plain_type(like.tensor))  # type: ignore[arg-type]


def pull(trace: Trace, operands: Values, cts: Sequence[Value | None], wrt: Sequence[bool]) -> list[Value | None]:
    """Gradients of a sub-trace's outputs by the operands wanted, computing its forward again here."""
    wanted = [v for v, w in zip(trace.inputs, wrt, strict=True) if w]
    seeds: dict[Value, Value] = {}
    for out, ct in zip(trace.outputs, cts, strict=True):
        if floats(out) and ct is not None:
            seeds[out] = aten.add(seeds[out], ct) if out in seeds else ct  # type: ignore[index]
    # outputs that a formula renames keep their order among the results
    heads = list(dict.fromkeys(v for v in trace.results() if v in seeds))
    joint = vjp(trace, wanted, _builder().mode, pull=heads, again=_builder().again)
    names = [v for v in heads if _pulled(joint, trace, v)]
    made = splice(joint.trace, [*operands, *(seeds[v] for v in names)])
    grads = iter(made[len(trace.outputs) :])
    return [next(grads) if w else None for w in wrt]  # type: ignore[misc]


def _pulled(joint: object, trace: Trace, v: Value) -> bool:
    """Whether this output of the trace got a cotangent input, under whatever name the joint trace gives it."""
    place = trace.outputs.index(v)
    return joint.trace.outputs[place] in joint.pulled  # type: ignore[attr-defined]


def push(trace: Trace, operands: Values, tangents: Sequence[Value | None]) -> tuple[list[Value], list[Value | None]]:
    """Results of a sub-trace and their tangents, computed here."""
    moving = [v for v, t in zip(trace.inputs, tangents, strict=True) if t is not None]
    pushed = jvp(trace, moving, _builder().mode)
    made = splice(pushed, [*operands, *(t for t in tangents if t is not None)])
    count = len(trace.outputs)
    return made[:count], made[count:]  # type: ignore[return-value]


def rows(trace: Trace, on: Sequence[bool], operands: Values, size: Size) -> list[Value]:
    """Results of a sub-trace over a batch, all of them with the batch at dimension 0."""
    batched = {v: (a.tensor, 0) for v, a, b in zip(trace.inputs, operands, on, strict=True) if b}
    made = vmap(trace, batched, size, _builder().mode, randomness="different")
    outs = inline(_builder(), made.trace, operands)
    return [o if b else carried(o, size) for o, b in zip(outs, made.on, strict=True)]  # type: ignore[misc,arg-type]


def carried(x: Value, size: Size) -> Value:
    return aten.expand(aten.unsqueeze(x, 0), [size, *x.shape])


def agreed(values: Sequence[Arg], types: Sequence[Type]) -> list[Arg]:
    """Results in the layout that every branch, or every turn of a loop, has to give."""
    return [conform(v, t) if isinstance(t, TensorType) else v for v, t in zip(values, types, strict=True)]  # type: ignore[arg-type]


def batch_type(t: Type, size: Size) -> TensorType:
    assert isinstance(t, TensorType)
    return plain_type(TensorType(t.dtype, (size, *t.shape), (), t.device))


# --- functions with a derivative of their own -----------------------------------------------------


def _custom_forward(need: object, primal: Trace, fwd: Trace, bwd: Trace, *operands: Value) -> Generator:
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


def _function_vjp(
    cts: list, y: list, results: int, fwd: Trace, bwd: Trace, push_: object, *operands: Value
) -> tuple:
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
    return emit(
        AUTOGRAD_FUNCTION, results, new_fwd, new_bwd, new_push, *operands, types=types_of(new_fwd.outputs)
    )


# --- cond -----------------------------------------------------------------------------------------


def _cond_vjp(cts: list, y: list, pred: Value, true: Trace, false: Trace, *operands: Value) -> tuple:
    """The branch taken is computed again inside the backward branch."""
    wrt = [floats(a) for a in operands]
    seeds = {i: filled(ct, v) for i, (ct, v) in enumerate(zip(cts, y, strict=True)) if floats(v)}
    grads_like = [a for a in operands if floats(a)]
    types = [plain_type(a.tensor) for a in grads_like]

    def backward(branch: Trace) -> Trace:
        def body(*xs: Value) -> list[Arg]:
            given = dict(zip(seeds, xs[len(operands) :], strict=True))
            made = pull(branch, xs[: len(operands)], [given.get(i) for i in range(len(y))], wrt)
            full = [filled(g, a) for g, a, w in zip(made, operands, wrt, strict=True) if w]
            return agreed(full, types)

        return sub_trace(f"{branch.name}_backward", [*types_of(operands), *types_of(list(seeds.values()))], body)

    made = iter(emit(COND, pred, backward(true), backward(false), *operands, *seeds.values(), types=types))
    return (None, None, None, *(next(made) if w else None for w in wrt))


def _cond_jvp(ts: Sequence, y: list, pred: Value, true: Trace, false: Trace, *operands: Value) -> Pushed:
    tangents = {i: filled(t, a) for i, (t, a) in enumerate(zip(ts[3:], operands, strict=True)) if t is not None}
    types = [*types_of(y), *(plain_type(v.tensor) for v in y if floats(v))]

    def forward(branch: Trace) -> Trace:
        def body(*xs: Value) -> list[Arg]:
            given = dict(zip(tangents, xs[len(operands) :], strict=True))
            outs, moved = push(branch, xs[: len(operands)], [given.get(i) for i in range(len(operands))])
            return agreed([*outs, *(filled(t, v) for t, v in zip(moved, outs, strict=True) if floats(v))], types)

        return sub_trace(f"{branch.name}_tangent", [*types_of(operands), *types_of(list(tangents.values()))], body)

    made = emit(COND, pred, forward(true), forward(false), *operands, *tangents.values(), types=types)
    moved = iter(made[len(y) :])
    return Pushed(made[: len(y)], [next(moved) if floats(v) else None for v in y])


def _cond_batch(size: Size, on: list, pred: Value, true: Trace, false: Trace, *operands: Value) -> list[Value]:
    flags = [bool(b) for b in on[3:]]
    if on[0]:  # the examples part ways: compute both and choose
        yes, no = rows(true, flags, operands, size), rows(false, flags, operands, size)
        return [aten.where(_column(pred, a), a, b) for a, b in zip(yes, no, strict=True)]
    types = [batch_type(v.type, size) for v in true.outputs]  # type: ignore[union-attr]

    def over(branch: Trace) -> Trace:
        return sub_trace(branch.name, types_of(operands), lambda *xs: agreed(rows(branch, flags, xs, size), types))

    return emit(COND, pred, over(true), over(false), *operands, types=types)


def _column(pred: Value, like: Value) -> Value:
    """A predicate for every example, to choose between whole examples."""
    pred = pred if pred.ndim == 1 else aten.reshape(pred, [pred.shape[0]])
    return aten.reshape(pred, [pred.shape[0], *[1] * (like.ndim - 1)])


# --- while_loop -----------------------------------------------------------------------------------


def _while_vjp(cts: object, y: object, *args: Arg) -> tuple:
    raise RuleError(
        "while_loop cannot be differentiated in reverse: how many turns it takes is known only when it runs, and every "
        "turn would have to be kept. Use scan with a fixed number of turns, or forward mode (jvp, jacfwd)."
    )


def _while_jvp(ts: Sequence, y: list, test: Trace, body: Trace, carried_: int, *operands: Value) -> Pushed:
    tangents = [filled(t, a) if floats(a) else None for t, a in zip(ts[3:], operands, strict=True)]
    carry, rest = operands[:carried_], operands[carried_:]
    t_carry, t_rest = ([t for t in part if t is not None] for part in (tangents[:carried_], tangents[carried_:]))
    order = [*carry, *t_carry, *rest, *t_rest]
    types = [*types_of(carry), *(plain_type(t.tensor) for t in t_carry)]

    def split(xs: Values) -> tuple[Values, list[Value | None]]:
        a, b, c = len(carry), len(carry) + len(t_carry), len(carry) + len(t_carry) + len(rest)
        given = iter((*xs[a:b], *xs[c:]))
        return (*xs[:a], *xs[b:c]), [next(given) if t is not None else None for t in tangents]

    def turn(*xs: Value) -> list[Arg]:
        outs, moved = push(body, *split(xs))
        return agreed([*outs, *(filled(t, v) for t, v in zip(moved, outs, strict=True) if floats(v))], types)

    new_test = sub_trace(test.name, types_of(order), lambda *xs: splice(test, split(xs)[0]))
    new_body = sub_trace(f"{body.name}_tangent", types_of(order), turn)
    made = emit(WHILE_LOOP, new_test, new_body, len(types), *order, types=types)
    moved = iter(made[carried_:])
    return Pushed(made[:carried_], [next(moved) if floats(v) else None for v in y])


def _while_batch(size: Size, on: list, test: Trace, body: Trace, carried_: int, *operands: Value) -> list[Value]:
    """All examples turn until the last is done; those that are done keep what they have."""
    flags = [True] * carried_ + [bool(b) for b in on[3 + carried_ :]]
    spread = [a if b or i >= carried_ else carried(a, size) for i, (a, b) in enumerate(zip(operands, on[3:], strict=True))]
    types = [batch_type(v.type, size) for v in body.outputs]  # type: ignore[union-attr]
    inputs = [*agreed(spread[:carried_], types), *spread[carried_:]]

    def turn(*xs: Value) -> list[Arg]:
        going = rows(test, flags, xs, size)[0]
        made = rows(body, flags, xs, size)
        return agreed([aten.where(_column(going, n), n, o) for n, o in zip(made, xs, strict=False)], types)

    new_test = sub_trace(test.name, types_of(inputs), lambda *xs: [aten.any(rows(test, flags, xs, size)[0])])
    new_body = sub_trace(body.name, types_of(inputs), turn)
    return emit(WHILE_LOOP, new_test, new_body, carried_, *inputs, types=types)


# --- scan -----------------------------------------------------------------------------------------


def _row(t: TensorType) -> TensorType:
    return TensorType(t.dtype, t.shape[1:], t.stride[1:], t.device)


def _stacked(t: TensorType, length: Size) -> TensorType:
    return plain_type(TensorType(t.dtype, (length, *t.shape), (), t.device))


def _scan_jvp(
    ts: Sequence, y: list, body: Trace, carried_: int, sliced: int, reverse: bool, *operands: Value
) -> Pushed:
    tangents = [filled(t, a) if floats(a) else None for t, a in zip(ts[4:], operands, strict=True)]
    parts = [slice(0, carried_), slice(carried_, carried_ + sliced), slice(carried_ + sliced, None)]
    order: list[Value] = []
    for part in parts:
        order += [*operands[part], *(t for t in tangents[part] if t is not None)]
    counts = [len(operands[p]) + sum(t is not None for t in tangents[p]) for p in parts]
    inner = [*order[: counts[0]], *order[counts[0] : counts[0] + counts[1]], *order[counts[0] + counts[1] :]]
    types = [a.tensor if not counts[0] <= i < counts[0] + counts[1] else _row(a.tensor) for i, a in enumerate(inner)]
    outs_of = body.outputs

    def turn(*xs: Value) -> list[Arg]:
        values, moved, at = [], [], 0
        for part in parts:
            own = len(operands[part])
            values += xs[at : at + own]
            given = iter(xs[at + own :])
            there = [t is not None for t in tangents[part]]
            moved += [next(given) if w else None for w in there]
            at += own + sum(there)
        outs, tans = push(body, values, moved)
        full = [filled(t, v) if floats(v) else None for t, v in zip(tans, outs, strict=True)]
        carry = [*outs[:carried_], *(t for t in full[:carried_] if t is not None)]
        return [*agreed(carry, types[: len(carry)]), *outs[carried_:], *(t for t in full[carried_:] if t is not None)]

    new_body = sub_trace(f"{body.name}_tangent", types, turn)
    length = operands[carried_].shape[0]
    n_carry = counts[0]
    result_types = [
        v.tensor if i < n_carry else _stacked(v.tensor, length) for i, v in enumerate(new_body.outputs)  # type: ignore[union-attr]
    ]
    made = emit(SCAN, new_body, n_carry, counts[1], reverse, *order, types=result_types)
    carry, t_carry = made[:carried_], iter(made[carried_:n_carry])
    n_y = len(outs_of) - carried_
    ys, t_ys = made[n_carry : n_carry + n_y], iter(made[n_carry + n_y :])
    results = [*carry, *ys]
    flows = [floats(v) for v in outs_of]
    return Pushed(
        results,
        [(next(t_carry) if i < carried_ else next(t_ys)) if f else None for i, f in enumerate(flows)],
    )


def _scan_forward(
    need: Sequence, body: Trace, carried_: int, sliced: int, reverse: bool, *operands: Value
) -> Generator:
    """Forward keeps the carry every turn began with; backward turns the other way."""
    split = carried_ + sliced
    xs, rest = operands[carried_:split], operands[split:]
    length = xs[0].shape[0]
    row_types = [*types_of(operands[:carried_]), *(_row(x.tensor) for x in xs), *types_of(rest)]
    outs = [v.tensor for v in body.outputs]  # type: ignore[union-attr]

    def keeping(*args: Value) -> list[Arg]:
        return [*splice(body, args), *(aten.clone(c) for c in args[:carried_])]

    saving = sub_trace(body.name, row_types, keeping)
    kinds = [*outs[:carried_], *(_stacked(t, length) for t in (*outs[carried_:], *row_types[:carried_]))]  # type: ignore[misc]
    made = emit(SCAN, saving, carried_, sliced, reverse, *operands, types=kinds)
    results, began = made[: len(outs)], made[len(outs) :]
    given = yield results
    cts = given if isinstance(given, list) else [given]
    wrt = [floats(v) for v in body.inputs]
    # the carry of the backward loop: cotangents of the carry, sums for what every turn reads
    ct_carry = [filled(ct, v) for ct, v in zip(cts[:carried_], results, strict=False) if floats(v)]
    sums = [zeros(v.tensor) for v, w in zip(rest, wrt[split:], strict=True) if w]
    ct_ys = [filled(ct, v) for ct, v in zip(cts[carried_:], results[carried_:], strict=True) if floats(v)]
    carry = [*ct_carry, *sums]
    slices = [*ct_ys, *began, *xs]
    types = [*types_of(carry), *(_row(v.tensor) for v in slices), *types_of(rest)]

    def back(*args: Value) -> list[Arg]:
        acc, pieces, held = args[: len(carry)], args[len(carry) : len(carry) + len(slices)], args[len(carry) + len(slices) :]
        seeds = iter((*acc[: len(ct_carry)], *pieces[: len(ct_ys)]))
        seeded = [next(seeds) if t.is_differentiable else None for t in outs]
        inputs = [*pieces[len(ct_ys) :], *held]
        grads = pull(body, inputs, seeded, wrt)
        full = [filled(g, a) if w else None for g, a, w in zip(grads, inputs, wrt, strict=True)]
        new_carry = [g for g in full[:carried_] if g is not None]
        added = [aten.add(s, g) for s, g in zip(acc[len(ct_carry) :], [g for g in full[split:] if g is not None], strict=True)]
        return [*agreed([*new_carry, *added], types[: len(carry)]), *(g for g in full[carried_:split] if g is not None)]

    body_back = sub_trace(f"{body.name}_backward", types, back)
    kinds = [
        v.tensor if i < len(carry) else _stacked(v.tensor, length) for i, v in enumerate(body_back.outputs)  # type: ignore[union-attr]
    ]
    got = emit(SCAN, body_back, len(carry), len(slices), not reverse, *carry, *slices, *rest, types=kinds)
    by_carry, by_rest, by_xs = iter(got[: len(ct_carry)]), iter(got[len(ct_carry) : len(carry)]), iter(got[len(carry) :])
    grads = [next(by_carry) if w else None for w in wrt[:carried_]]
    grads += [next(by_xs) if w else None for w in wrt[carried_:split]]
    grads += [next(by_rest) if w else None for w in wrt[split:]]
    return (None, None, None, None, *grads)


def _scan_batch(
    size: Size, on: list, body: Trace, carried_: int, sliced: int, reverse: bool, *operands: Value
) -> list[Value]:
    split = carried_ + sliced
    flags = [True] * carried_ + [bool(b) for b in on[4 + carried_ :]]
    types = [batch_type(v.type, size) for v in body.outputs[:carried_]]  # type: ignore[union-attr]
    init = agreed([a if b else carried(a, size) for a, b in zip(operands, on[4 : 4 + carried_], strict=False)], types)
    xs = [aten.movedim(x, 0, 1) if b else x for x, b in zip(operands[carried_:split], flags[carried_:], strict=False)]
    inputs = [*init, *xs, *operands[split:]]
    row_types = [v.type if not carried_ <= i < split else _row(v.tensor) for i, v in enumerate(inputs)]  # type: ignore[union-attr]

    def turn(*args: Value) -> list[Arg]:
        made = rows(body, flags, args, size)
        return [*agreed(made[:carried_], types), *made[carried_:]]

    new_body = sub_trace(body.name, row_types, turn)
    length = xs[0].shape[0]
    kinds = [*types, *(_stacked(v.tensor, length) for v in new_body.outputs[carried_:])]  # type: ignore[union-attr]
    made = emit(SCAN, new_body, carried_, sliced, reverse, *inputs, types=kinds)
    return [*made[:carried_], *(aten.movedim(v, 0, 1) for v in made[carried_:])]


for _name, _rules in {
    CUSTOM_VJP: {"forward": _custom_forward, "jvp": _custom_jvp, "batch": _custom_batch},
    AUTOGRAD_FUNCTION: {"vjp": _function_vjp, "jvp": _function_jvp, "batch": _function_batch},
    COND: {"vjp": _cond_vjp, "jvp": _cond_jvp, "batch": _cond_batch},
    WHILE_LOOP: {"vjp": _while_vjp, "jvp": _while_jvp, "batch": _while_batch},
    SCAN: {"forward": _scan_forward, "jvp": _scan_jvp, "batch": _scan_batch},
}.items():
    declare(f"tessera.{_name.name}", "control", real=False, **_rules)

__all__ = ["pull", "push", "rows", "size_key", "sub_trace"]
