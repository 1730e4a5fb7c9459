"""A function called inside a program, recorded as a sub-trace and one equation that calls it.

In: `call` or `checkpoint`, the function and its arguments, while a program is being recorded. Out: the function's
result; the program has one equation more. What the function closes over becomes an operand. What it writes comes
out of the body as a further result and is written outside, and results that are views of operands are made there
again, so that a body computes and does nothing else. Bodies that compute the same are one: a block that a model
repeats is recorded, printed and compiled once. A body that cannot be (sizes known only when it runs, operands that
share memory while one of them is written) stands in the program itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
import torch.utils.checkpoint

from tessera.frontends.captured import aliases, written_unseen
from tessera.frontends.functional.trace import WATCHED, argument_names, autocast_state, tracing, watching
from tessera.frontends.requires_grad import requires_grad_known
from tessera.ir import fake
from tessera.ir.aliased import Aliased
from tessera.ir.builder import Builder
from tessera.ir.call import CALL, CHECKPOINT
from tessera.ir.equation import NO_GRAD, Arg, Special, Value, recompute_region, recompute_tag
from tessera.ir.record import Recorded, Recorder, record_with, recording
from tessera.ir.replay import sweep
from tessera.ir.trace import Trace
from tessera.ir.types import SYMBOLIC, type_of
from tessera.torch_internals import pytree
from tessera.torch_internals.higher_order import REGION


@dataclass(frozen=True)
class Body:
    """A sub-trace, and how the function's result is put together from what it gives."""

    trace: Trace  # outputs: fresh results, each once, then the new contents of what is written
    closed: tuple[torch.Tensor, ...]  # the operands after the arguments
    spec: pytree.TreeSpec
    leaves: tuple[object, ...]  # of the result; a tensor stands where `places` or `aliased` says more
    places: dict[int, int]  # leaf -> output of the trace
    aliased: dict[int, Aliased]  # leaf -> the view of an operand or of an output that it is
    written: tuple[int, ...]  # operands that are written, in the order of the last outputs
    unseen: frozenset[int]  # those of them that keep the history they have


def record_call(
    op: Special,
    recorder: Recorder,
    make: Callable[[Builder], Callable],
    args: tuple,
    kwargs: dict,
    name: str,
    names: Callable[[], Sequence[str]],
    key: object = None,
) -> object:
    """The result of `make(builder)(*args, **kwargs)`, computed by one equation.

    `make` gives the function for the builder its equations go to; `names` gives those of tensors and symbolic numbers
    among the arguments, where a body is recorded. Calls with one `key` and equal types are known to have the same body.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    with fake.alone():
        leaves = [recorder.fake(x) if isinstance(x, torch.Tensor) else x for x in leaves]
    operands = list({id(x): x for x in leaves if isinstance(x, (torch.Tensor, *SYMBOLIC))}.values())
    places = {id(x): i for i, x in enumerate(operands)}

    def flat(fn: Callable) -> Callable:
        def run(*given: object) -> object:
            full = [given[places[id(x)]] if id(x) in places else x for x in leaves]
            inner_args, inner_kwargs = pytree.tree_unflatten(full, spec)
            return fn(*inner_args, **inner_kwargs)

        return run

    def record() -> Body | None:
        known = names()
        chosen = [known[i] if i < len(known) else "x" for i in range(len(operands))]
        return _record(recorder, lambda builder: flat(make(builder)), operands, chosen, name)

    if key is None:
        body = record()
    else:
        full_key = (key, tuple(_operand_key(x) for x in operands), torch.is_grad_enabled(), *autocast_state())
        if full_key not in recorder.bodies:
            recorder.bodies[full_key] = record()
        body = recorder.bodies[full_key]
    if body is None or _entangled(recorder, body, (*operands, *body.closed)):
        return _in_program(op, recorder, make(recorder.builder), args, kwargs)
    return _emit(op, recorder, body, (*operands, *body.closed))


def _operand_key(x: object) -> object:
    return type_of(x).key() if isinstance(x, torch.Tensor) else str(x)


def _record(
    recorder: Recorder, make: Callable[[Builder], Callable], operands: list, names: list[str], name: str
) -> Body | None:
    """The function as a body; None where it has to stand in the program itself."""
    casts = autocast_state()
    builder = Builder(name, recorder.builder.mode)
    fn = make(builder)

    def run(*args: object) -> object:
        with ExitStack() as stack:
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            return fn(*args)

    inner = Recorder(builder, recorder.keep, recorder.locate)
    inner.base_grad, inner.bodies = recorder.base_grad, recorder.bodies  # so `no_grad` around the call is seen inside
    with ExitStack() as stack:
        if tracing():
            stack.enter_context(watching(builder))
            stack.enter_context(requires_grad_known(builder, operands, grad=recorder.base_grad))
        stack.enter_context(fake.alone())
        fakes = [fake.fake_of(type_of(x), builder.mode) if isinstance(x, torch.Tensor) else x for x in operands]  # type: ignore[arg-type]
        recorded = record_with(inner, run, fakes, names, close=True)
    if any(v not in recorded.trace.inputs for v, _ in recorded.trace.symbols.values()):
        return None
    return _shared(recorder, _body(recorded))


def _body(recorded: Recorded) -> Body:
    aliased, bases = aliases(recorded)
    outputs = (*recorded.trace.outputs, *(base.value for base in bases))
    fresh = [
        i for i, o in enumerate(outputs) if isinstance(o, Value) and i not in aliased and not _is_number(recorded, i)
    ]
    results = list(dict.fromkeys(outputs[i] for i in fresh))
    position = {v: i for i, v in enumerate(results)}
    places = {i: position[outputs[i]] for i in fresh}
    views = {i: replace(a, source=places[a.source]) if a.of_output else a for i, a in aliased.items()}
    inputs = recorded.trace.inputs
    written = tuple(inputs.index(v) for v in recorded.trace.mutations)
    trace = recorded.trace.with_(outputs=(*results, *recorded.trace.mutations.values()), mutations={})
    unseen = frozenset(map(inputs.index, written_unseen(recorded.trace.equations, recorded.trace.mutations)))
    return Body(sweep(trace), recorded.closed, recorded.spec, tuple(recorded.outputs), places, views, written, unseen)


def _is_number(recorded: Recorded, place: int) -> bool:
    return place < len(recorded.outputs) and not isinstance(recorded.outputs[place], torch.Tensor)


# --- one body for all that compute the same -------------------------------------------------------


def _shared(recorder: Recorder, body: Body) -> Body:
    """The same with the trace of an earlier body that has the same equations, if there is one."""
    return replace(body, trace=recorder.bodies.setdefault(structure(body.trace), body.trace))


def structure(trace: Trace) -> tuple:
    """A key that two traces share if they differ in names and sources alone."""
    number: dict[Value, int] = {}

    def define(values: Sequence[Value | None]) -> tuple:
        for v in values:
            if v is not None:
                number[v] = len(number)
        return tuple(None if v is None else v.type.key() for v in values)

    def read(a: Arg) -> object:
        if isinstance(a, Value):
            return "value", number[a]
        if isinstance(a, (list, tuple)):
            return (type(a).__name__, *map(read, a))
        if isinstance(a, dict):
            return tuple((k, read(v)) for k, v in a.items())
        if isinstance(a, slice):
            return "slice", read(a.start), read(a.stop), read(a.step)
        return fake.argument_key(a)

    inputs = define(trace.inputs)
    steps = [(e.op, read(e.args), read(e.kwargs), define(e.outputs), e.many, e.tags) for e in trace.equations]
    symbols = tuple((s, number[v], dim) for s, (v, dim) in trace.symbols.items())
    return inputs, tuple(steps), read(trace.outputs), symbols


# --- the call -------------------------------------------------------------------------------------


def _entangled(recorder: Recorder, body: Body, operands: Sequence[object]) -> bool:
    """The body writes memory that another operand shares."""
    if not body.written:
        return False
    with fake.alone():
        roots = [id(recorder.ref(recorder.fake(x)).root) for x in operands if isinstance(x, torch.Tensor)]
    return len(set(roots)) < len(roots)


def _emit(op: Special, recorder: Recorder, body: Body, operands: tuple) -> object:
    types = [o.type for o in body.trace.outputs]  # type: ignore[union-attr]
    tags = recorder.extra_tags  # `no_grad` is on the body's own equations
    outs = recorder.special(op, (body.trace, *operands), {}, types, tags=tags)
    tags = recorder.tags()  # of the writes, which stand outside
    with fake.alone():
        operands = tuple(recorder.fake(x) if isinstance(x, torch.Tensor) else x for x in operands)
        for place, new in zip(body.written, outs[len(outs) - len(body.written) :], strict=True):
            recorder.builder.tags = tags | {NO_GRAD} if place in body.unseen else tags
            recorder.write_to(recorder.ref(operands[place]), recorder.value(new))  # type: ignore[arg-type]
    recorder.builder.tags = tags
    leaves = list(body.leaves)
    for i, place in body.places.items():
        if i < len(leaves):
            leaves[i] = outs[place]
    for i, alias in body.aliased.items():
        leaves[i] = alias.make(outs[alias.source] if alias.of_output else operands[alias.source])  # type: ignore[arg-type]
    return pytree.tree_unflatten(leaves, body.spec)


def _in_program(op: Special, recorder: Recorder, fn: Callable, args: tuple, kwargs: dict) -> object:
    """No sub-trace: the function's equations stand in the program, those of a checkpoint marked."""
    before = recorder.extra_tags
    if op is CHECKPOINT and recompute_region(before) is None:
        recorder.extra_tags = before | {recompute_tag(f"from {len(recorder.builder.equations)}")}
    try:
        return fn(*args, **kwargs)
    finally:
        recorder.extra_tags = before


# --- functions of the user's, in functional tracing -----------------------------------------------


def record_function_call(op: Special, recorder: Recorder, func: Callable, args: tuple, kwargs: dict) -> object:
    """`func(*args, **kwargs)` as one equation."""
    name = getattr(func, "__name__", type(func).__name__).replace("<lambda>", "body")
    names = zip(pytree.tree_leaves((args, kwargs)), argument_names(func, args, kwargs), strict=True)
    chosen = {id(x): n for x, n in names if isinstance(x, (torch.Tensor, *SYMBOLIC))}
    return record_call(op, recorder, lambda _: func, args, kwargs, name, lambda: list(chosen.values()))


def _watched_checkpoint(_: object) -> Callable:
    """torch.utils.checkpoint relies on autograd's hooks; in a traced program it is an equation."""

    def call(function: Callable, *args: object, **kwargs: object) -> object:
        recorder = recording()
        if recorder is None or not tracing() or kwargs.get("context_fn") is not None:
            return _checkpoint(function, *args, **kwargs)
        own = {k: v for k, v in kwargs.items() if k not in _CHECKPOINT_OPTIONS}
        return record_function_call(CHECKPOINT, recorder, function, args, own)

    return call


_CHECKPOINT_OPTIONS = frozenset(
    ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")
)


def _watched_region(original: Callable) -> Callable:
    """A function marked with torch.compiler.nested_compile_region."""

    def call(func: Callable, *args: object, **kwargs: object) -> object:
        recorder = recording()
        if recorder is None or not tracing():
            return original(func, *args, **kwargs)
        return record_function_call(CALL, recorder, func, args, kwargs)

    return call


# What a program imports runs what stands at this attribute, so one that holds the function from before is seen too.
_checkpoint = torch.utils.checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]
WATCHED.append((_checkpoint, "__dynamo_disable", _watched_checkpoint))
WATCHED.append((*REGION, _watched_region))
