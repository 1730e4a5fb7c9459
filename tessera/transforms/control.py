"""Derivatives and batching of control flow: each rule transforms the sub-traces and emits an equation over them.

Reverse mode computes a branch again inside its backward branch, and runs a scan the other way over the carries it
kept; a while_loop has forward mode only. A predicate that differs between examples becomes a choice, a loop turns
until the last example is done.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Value
from tessera.ir.trace import Trace
from tessera.ir.types import Size, TensorType
from tessera.ops.control import COND, SCAN, WHILE_LOOP
from tessera.ops.families import carry as over_batch
from tessera.ops.op import declare
from tessera.transforms.jvp import Pushed
from tessera.transforms.subtrace import (
    Values,
    agreed,
    batch_type,
    emit,
    filled,
    floats,
    plain_type,
    pull,
    push,
    rows,
    splice,
    sub_trace,
    types_of,
    zeros,
)
from tessera.util.errors import RuleError

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
            grads = pull(branch, xs[: len(operands)], [given.get(i) for i in range(len(y))], wrt)
            full = [filled(g, a) for g, a, w in zip(grads, operands, wrt, strict=True) if w]
            return agreed(full, types)

        return sub_trace(f"{branch.name}_backward", [*types_of(operands), *types_of(list(seeds.values()))], body)

    grads = iter(emit(COND, pred, backward(true), backward(false), *operands, *seeds.values(), types=types))
    return (None, None, None, *(next(grads) if w else None for w in wrt))


def _cond_jvp(ts: Sequence, y: list, pred: Value, true: Trace, false: Trace, *operands: Value) -> Pushed:
    tangents = {i: filled(t, a) for i, (t, a) in enumerate(zip(ts[3:], operands, strict=True)) if t is not None}
    types = [*types_of(y), *(plain_type(v.tensor) for v in y if floats(v))]

    def forward(branch: Trace) -> Trace:
        def body(*xs: Value) -> list[Arg]:
            given = dict(zip(tangents, xs[len(operands) :], strict=True))
            outs, moved = push(branch, xs[: len(operands)], [given.get(i) for i in range(len(operands))])
            return agreed([*outs, *(filled(t, v) for t, v in zip(moved, outs, strict=True) if floats(v))], types)

        return sub_trace(f"{branch.name}_tangent", [*types_of(operands), *types_of(list(tangents.values()))], body)

    pushed = emit(COND, pred, forward(true), forward(false), *operands, *tangents.values(), types=types)
    moved = iter(pushed[len(y) :])
    return Pushed(pushed[: len(y)], [next(moved) if floats(v) else None for v in y])


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
    pushed = emit(WHILE_LOOP, new_test, new_body, len(types), *order, types=types)
    moved = iter(pushed[carried_:])
    return Pushed(pushed[:carried_], [next(moved) if floats(v) else None for v in y])


def _while_batch(size: Size, on: list, test: Trace, body: Trace, carried_: int, *operands: Value) -> list[Value]:
    """All examples turn until the last is done; those that are done keep what they have."""
    flags = [True] * carried_ + [bool(b) for b in on[3 + carried_ :]]
    carrying = [over_batch(a, bool(b), size) for a, b in zip(operands[:carried_], on[3:], strict=False)]
    types = [batch_type(v.type, size) for v in body.outputs]  # type: ignore[union-attr]
    inputs = [*agreed(carrying, types), *operands[carried_:]]

    def turn(*xs: Value) -> list[Arg]:
        going = rows(test, flags, xs, size)[0]
        turned = rows(body, flags, xs, size)
        return agreed([aten.where(_column(going, n), n, o) for n, o in zip(turned, xs, strict=False)], types)

    new_test = sub_trace(test.name, types_of(inputs), lambda *xs: [aten.any(rows(test, flags, xs, size)[0])])
    new_body = sub_trace(body.name, types_of(inputs), turn)
    return emit(WHILE_LOOP, new_test, new_body, carried_, *inputs, types=types)


# --- scan -----------------------------------------------------------------------------------------


def _row(t: TensorType) -> TensorType:
    return TensorType(t.dtype, t.shape[1:], t.stride[1:], t.device)


def _stacked(t: TensorType, length: Size) -> TensorType:
    return plain_type(TensorType(t.dtype, (length, *t.shape), (), t.device))


def _loop_types(body: Trace, carry: int, length: Size) -> list[TensorType]:
    """What a scan over this body gives: the last carry, everything else stacked."""
    outs = [o.tensor for o in body.outputs if isinstance(o, Value)]
    return [*outs[:carry], *(_stacked(t, length) for t in outs[carry:])]


def _scan_jvp(
    ts: Sequence, y: list, body: Trace, carried_: int, sliced: int, reverse: bool, *operands: Value
) -> Pushed:
    tangents = [filled(t, a) if floats(a) else None for t, a in zip(ts[4:], operands, strict=True)]
    parts = [slice(0, carried_), slice(carried_, carried_ + sliced), slice(carried_ + sliced, None)]
    order: list[Value] = []
    for part in parts:
        order += [*operands[part], *(t for t in tangents[part] if t is not None)]
    counts = [len(operands[p]) + sum(t is not None for t in tangents[p]) for p in parts]
    types = [a.tensor if not counts[0] <= i < counts[0] + counts[1] else _row(a.tensor) for i, a in enumerate(order)]
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
    result_types = _loop_types(new_body, n_carry, length)
    pushed = emit(SCAN, new_body, n_carry, counts[1], reverse, *order, types=result_types)
    carry, t_carry = pushed[:carried_], iter(pushed[carried_:n_carry])
    n_y = len(outs_of) - carried_
    ys, t_ys = pushed[n_carry : n_carry + n_y], iter(pushed[n_carry + n_y :])
    results = [*carry, *ys]
    flows = [floats(v) for v in outs_of]
    return Pushed(
        results, [(next(t_carry) if i < carried_ else next(t_ys)) if f else None for i, f in enumerate(flows)]
    )


def _scan_forward(
    need: Sequence, body: Trace, carried_: int, sliced: int, reverse: bool, *operands: Value
) -> Generator[list[Value], object, tuple]:
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
    kept = emit(SCAN, saving, carried_, sliced, reverse, *operands, types=kinds)
    results, began = kept[: len(outs)], kept[len(outs) :]
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
        acc, pieces, held = (
            args[: len(carry)],
            args[len(carry) : len(carry) + len(slices)],
            args[len(carry) + len(slices) :],
        )
        seeds = iter((*acc[: len(ct_carry)], *pieces[: len(ct_ys)]))
        seeded = [next(seeds) if t.is_differentiable else None for t in outs]
        inputs = [*pieces[len(ct_ys) :], *held]
        grads = pull(body, inputs, seeded, wrt)
        full = [filled(g, a) if w else None for g, a, w in zip(grads, inputs, wrt, strict=True)]
        new_carry = [g for g in full[:carried_] if g is not None]
        added = [
            aten.add(s, g)
            for s, g in zip(acc[len(ct_carry) :], [g for g in full[split:] if g is not None], strict=True)
        ]
        return [*agreed([*new_carry, *added], types[: len(carry)]), *(g for g in full[carried_:split] if g is not None)]

    body_back = sub_trace(f"{body.name}_backward", types, back)
    kinds = _loop_types(body_back, len(carry), length)
    got = emit(SCAN, body_back, len(carry), len(slices), not reverse, *carry, *slices, *rest, types=kinds)
    by_carry, by_rest, by_xs = (
        iter(got[: len(ct_carry)]),
        iter(got[len(ct_carry) : len(carry)]),
        iter(got[len(carry) :]),
    )
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
    init = agreed([over_batch(a, bool(b), size) for a, b in zip(operands, on[4 : 4 + carried_], strict=False)], types)
    xs = [aten.movedim(x, 0, 1) if b else x for x, b in zip(operands[carried_:split], flags[carried_:], strict=False)]
    inputs = [*init, *xs, *operands[split:]]
    row_types = [v.type if not carried_ <= i < split else _row(v.tensor) for i, v in enumerate(inputs)]  # type: ignore[union-attr]

    def turn(*args: Value) -> list[Arg]:
        outs = rows(body, flags, args, size)
        return [*agreed(outs[:carried_], types), *outs[carried_:]]

    new_body = sub_trace(body.name, row_types, turn)
    length = xs[0].shape[0]
    kinds = [*types, *(_stacked(v.tensor, length) for v in new_body.outputs[carried_:])]  # type: ignore[union-attr]
    outs = emit(SCAN, new_body, carried_, sliced, reverse, *inputs, types=kinds)
    return [*outs[:carried_], *(aten.movedim(v, 0, 1) for v in outs[carried_:])]


declare("tessera.cond", "control", vjp=_cond_vjp, jvp=_cond_jvp, batch=_cond_batch, real=False)
declare("tessera.while_loop", "control", vjp=_while_vjp, jvp=_while_jvp, batch=_while_batch, real=False)
declare("tessera.scan", "control", forward=_scan_forward, jvp=_scan_jvp, batch=_scan_batch, real=False)
