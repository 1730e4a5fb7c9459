"""Control flow on values known only when the program runs: cond, while_loop and scan.

In: Python functions for the branches or the body, and operands, any pytrees of tensors. Inside a recording, out
comes one equation whose branches are sub-traces; what they close over of the surrounding program becomes an
operand. Outside of one, plain Python runs. PyTorch's own higher-order operators, as TorchDynamo's graphs have
them, are recorded the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tessera.frontends.functional.custom import Operands, pure, rewire
from tessera.frontends.functional.trace import WATCHED, Traced, trace_function, tracing
from tessera.ir.equation import Value
from tessera.ir.record import Recorder, recording
from tessera.ir.types import TensorType, Type
from tessera.ops.control import COND, SCAN, WHILE_LOOP
from tessera.torch_internals import pytree
from tessera.torch_internals.higher_order import LOOPS
from tessera.util.errors import InputError


def cond(pred: object, true_fn: Callable, false_fn: Callable, operands: tuple = ()) -> object:
    """`true_fn(*operands)` if the one-element tensor `pred` holds, else `false_fn(*operands)`."""
    recorder = recording()
    if recorder is None or not isinstance(pred, torch.Tensor):
        return (true_fn if bool(pred) else false_fn)(*operands)
    return record_cond(recorder, pred, true_fn, false_fn, tuple(operands))


def while_loop(cond_fn: Callable, body_fn: Callable, carried_inputs: tuple) -> tuple:
    """`carry = body_fn(*carry)` while `cond_fn(*carry)` holds; gives the last carry."""
    recorder = recording()
    if recorder is not None:
        return record_while(recorder, cond_fn, body_fn, tuple(carried_inputs), ())
    carry = tuple(carried_inputs)
    while bool(cond_fn(*carry)):
        carry = _tuple(body_fn(*carry))
    return carry


def scan(combine_fn: Callable, init: object, xs: object, *, dim: int = 0, reverse: bool = False) -> tuple:
    """`carry, y = combine_fn(carry, x)` for every slice x of `xs`; gives the last carry and all y, stacked."""
    leaves, spec = pytree.tree_flatten(xs)
    if not leaves:
        raise InputError("scan: expected at least one tensor to go through, got none")
    if empty(leaves, dim):
        return over_nothing(combine_fn, init, xs, dim)
    xs = pytree.tree_unflatten([x.movedim(dim, 0) for x in leaves], spec)
    recorder = recording()
    if recorder is not None:
        carry, ys = record_scan(recorder, combine_fn, init, xs, reverse)
    else:
        carry, ys = _eager_scan(combine_fn, init, xs, reverse)
    return carry, pytree.tree_map(lambda y: y.movedim(0, dim), ys)


def empty(xs: Sequence[torch.Tensor], dim: int) -> bool:
    """Is there no slice to go through?"""
    return any(type(x.shape[dim]) is int and x.shape[dim] == 0 for x in xs)


def over_nothing(combine_fn: Callable, init: object, xs: object, dim: int) -> tuple:
    """A scan without a slice. What the results would be made of is seen on a slice of zeros."""
    leaves, spec = pytree.tree_flatten(xs)
    with torch.no_grad():
        row = pytree.tree_unflatten([x.movedim(dim, 0).new_zeros(x.movedim(dim, 0).shape[1:]) for x in leaves], spec)
        _, y = combine_fn(init, row)
    return init, pytree.tree_map(lambda y: y.new_empty((0, *y.shape)).movedim(0, dim), y)


def _eager_scan(combine_fn: Callable, init: object, xs: object, reverse: bool) -> tuple:
    leaves, spec = pytree.tree_flatten(xs)
    carry, rows, out_spec = init, [], None
    turns = range(leaves[0].shape[0])
    for t in reversed(turns) if reverse else turns:
        carry, y = combine_fn(carry, pytree.tree_unflatten([x[t] for x in leaves], spec))
        row, out_spec = pytree.tree_flatten(y)
        rows.append(row)
    assert out_spec is not None, "`over_nothing` serves what has no slice"
    columns = zip(*(reversed(rows) if reverse else rows), strict=True)
    return carry, pytree.tree_unflatten([torch.stack(c) for c in columns], out_spec)


# --- recording ------------------------------------------------------------------------------------


def record_cond(recorder: Recorder, pred: torch.Tensor, true_fn: Callable, false_fn: Callable, args: tuple) -> object:
    operands = Operands(args)
    true, false = _trace("cond", "if_true", true_fn, args), _trace("cond", "if_false", false_fn, args)
    if true.out_spec != false.out_spec:
        raise InputError(
            f"cond: expected both branches to give the same structure, got {true.out_spec} and {false.out_spec}"
        )
    _agree("cond", "the two branches", true.trace.outputs, [_type(o) for o in false.trace.outputs])
    slots = operands.slots(true), operands.slots(false)
    types = operands.types()
    branches = [rewire(t.trace, s, types) for t, s in zip((true, false), slots, strict=True)]
    outs = recorder.special(COND, (pred, *branches, *operands.tensors), {}, _types(branches[0].outputs))
    return true.pack(outs)


def record_while(recorder: Recorder, cond_fn: Callable, body_fn: Callable, carry: tuple, extra: tuple) -> tuple:
    args = (*carry, *extra)
    operands = Operands(args, moving=len(pytree.tree_leaves(carry)))
    test = _trace("while_loop", "test", cond_fn, args)
    body = _trace("while_loop", "turn", lambda *xs: _tuple(body_fn(*xs)), args)
    given = [_type(v) for v in body.trace.inputs[: len(pytree.tree_leaves(carry))]]
    _agree("while_loop", "the carry and what the body gives", body.trace.outputs, given)
    slots = operands.slots(test), operands.slots(body)
    types = operands.types()
    traces = [rewire(t.trace, s, types) for t, s in zip((test, body), slots, strict=True)]
    tensors = [_settled(x) if i < len(given) else x for i, x in enumerate(operands.tensors)]
    outs = recorder.special(WHILE_LOOP, (*traces, len(given), *tensors), {}, _types(body.trace.outputs))
    return tuple(pytree.tree_unflatten(outs, pytree.tree_structure(carry)))


def record_scan(recorder: Recorder, combine_fn: Callable, init: object, xs: object, reverse: bool) -> tuple:
    rows = pytree.tree_map(lambda x: x[0], xs)
    body = _trace("scan", "step", combine_fn, (init, rows))
    places = pytree.tree_unflatten(list(range(len(body.trace.outputs))), body.out_spec)
    if not (isinstance(places, tuple) and len(places) == 2):
        raise InputError(f"scan: expected the function to give (carry, y), got {body.out_spec}")
    carried, sliced = len(pytree.tree_leaves(init)), len(pytree.tree_leaves(rows))
    outputs = body.trace.outputs
    _agree(
        "scan",
        "the carry and what the function gives",
        outputs[:carried],
        [_type(v) for v in body.trace.inputs[:carried]],
    )
    operands = Operands((init, xs), moving=carried + sliced)
    slots = operands.slots(body)
    types = [*_types(body.trace.inputs[: carried + sliced]), *operands.types()[carried + sliced :]]
    trace = rewire(body.trace, slots, types)
    length = pytree.tree_leaves(xs)[0].shape[0]
    stacked = [_stacked(v.type, length) for v in outputs[carried:]]  # type: ignore[union-attr]
    tensors = [_settled(x) if i < carried else x for i, x in enumerate(operands.tensors)]
    outs = recorder.special(
        SCAN, (trace, carried, sliced, reverse, *tensors), {}, [*_types(outputs[:carried]), *stacked]
    )
    carry_spec, y_spec = (pytree.tree_structure(p) for p in places)
    return pytree.tree_unflatten(outs[:carried], carry_spec), pytree.tree_unflatten(outs[carried:], y_spec)


def _trace(name: str, part: str, fn: Callable, args: tuple) -> Traced:
    """A branch or body whose results are all tensors, laid out the same whatever computed them."""

    def laid_out(*xs: object) -> object:
        return pytree.tree_map(_settled, fn(*xs))

    traced = pure(trace_function(laid_out, args, name=part, close=True), f"a function given to {name}")
    for o in traced.trace.outputs:
        if not isinstance(o, Value):
            raise InputError(f"{name}: expected the functions to give tensors, got {o!r}")
    return traced


def _settled(x: object) -> object:
    return x.contiguous() if isinstance(x, torch.Tensor) else x


def _agree(name: str, what: str, values: Sequence[object], types: Sequence[Type]) -> None:
    for i, (v, t) in enumerate(zip(values, types, strict=False)):
        if str(_type(v)) != str(t):
            raise InputError(f"{name}: expected {what} to be of the same types, got {t} and {_type(v)} at number {i}")
    if len(values) < len(types):
        raise InputError(f"{name}: expected {len(types)} results, got {len(values)}")


def _type(v: object) -> Type:
    assert isinstance(v, Value)
    return v.type


def _types(values: Sequence[object]) -> list[Type]:
    return [_type(v) for v in values]


def _stacked(t: Type, length: int) -> TensorType:
    assert isinstance(t, TensorType)
    rest = 1
    for size in t.shape:
        rest = rest * size  # type: ignore[assignment]
    return TensorType(t.dtype, (length, *t.shape), (max(rest, 1), *t.stride), t.device)


def _tuple(carry: object) -> tuple:
    if not isinstance(carry, (tuple, list)):
        raise InputError(f"while_loop: expected the body to give a tuple, the next carry, got {type(carry).__name__}")
    return tuple(carry)


# --- PyTorch's higher-order operators, as TorchDynamo's graphs have them ---------------------------


@torch.ops.higher_order.cond.py_impl(Recorder)
def _torch_cond(mode: Recorder, pred: object, true_fn: Callable, false_fn: Callable, operands: tuple) -> object:
    if not isinstance(pred, torch.Tensor):
        return (true_fn if pred else false_fn)(*operands)
    return record_cond(mode, pred, true_fn, false_fn, tuple(operands))


@torch.ops.higher_order.while_loop.py_impl(Recorder)
def _torch_while(mode: Recorder, cond_fn: Callable, body_fn: Callable, carried: tuple, additional: tuple) -> tuple:
    return record_while(mode, cond_fn, body_fn, tuple(carried), tuple(additional))


@torch.ops.higher_order.scan.py_impl(Recorder)
def _torch_scan(mode: Recorder, combine_fn: Callable, init: list, xs: list, additional: tuple) -> list:
    count = len(init)

    def body(carry: list, row: list) -> tuple:
        outs = list(combine_fn(*carry, *row, *additional))
        return outs[:count], outs[count:]

    carry, ys = record_scan(mode, body, list(init), list(xs), reverse=False)
    return [*carry, *ys]


@torch.ops.higher_order.map_impl.py_impl(Recorder)
def _torch_map(mode: Recorder, fn: Callable, xs: list, additional: tuple) -> object:
    """In Dynamo's graphs `fn` gives a flat list; as a user wrote it, any structure."""
    return record_scan(mode, lambda _, row: ([], fn(*row, *additional)), [], list(xs), reverse=False)[1]


def _watched(ours: Callable) -> Callable:
    """torch.cond and its like compile what they are given with TorchDynamo; a traced program records it here."""

    def replace(original: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            return ours(*args, **kwargs) if tracing() else original(*args, **kwargs)

        return call

    return replace


WATCHED.append((torch, "cond", _watched(cond)))
WATCHED.append((LOOPS, "while_loop", _watched(while_loop)))
WATCHED.append((LOOPS, "scan", _watched(scan)))

__all__ = ["cond", "record_cond", "record_scan", "record_while", "scan", "while_loop"]
