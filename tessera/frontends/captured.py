"""What a frontend hands on: a Trace, and what its outputs share with its inputs and with each other.

A functional trace gives fresh results, but PyTorch programs may give back an input, a view of one, or several
views of one result. Those outputs are not computed by the trace: `aliased` says how each is made again from the
real input (after the input's own mutation has been carried out) or from the result they share, so that identity,
shared memory and autograd history are eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch

from tessera.frontends.grad_mode import kept_grad_mode, under_no_grad
from tessera.frontends.requires_grad import with_history
from tessera.ir.alias import KEEP_GRAD, Ref, keep_grad
from tessera.ir.aliased import Aliased, Step
from tessera.ir.builder import Builder
from tessera.ir.checks import record_assumptions
from tessera.ir.equation import NUMBER, Equation, Value, symbols_in, values_in
from tessera.ir.layouts import laid_as
from tessera.ir.record import Keep, Recorded, Recorder, record_with
from tessera.ir.trace import Trace
from tessera.ir.types import SYMBOLIC, TensorType, type_of
from tessera.torch_internals import pytree
from tessera.torch_internals.fake import FakeTensorMode, forget_tensors
from tessera.torch_internals.operators import OpOverload, op_name


@dataclass(frozen=True)
class Captured:
    trace: Trace
    spec: pytree.TreeSpec
    mode: FakeTensorMode
    outputs: int  # how many of the trace's outputs are the program's; others only serve as sources of aliases
    aliased: dict[int, Aliased] = field(default_factory=dict)  # position among the outputs -> how
    requires_grad: tuple[bool, ...] = ()  # of each input
    grad_after: bool | None = None  # grad mode as the program leaves it, where that is not how it found it
    enables_grad: bool = False  # called under no_grad, it turns gradients on for a part of itself
    # Outputs that the trace computes, for their history, and that lie in an input's memory -> where.
    placed: dict[int, Aliased] = field(default_factory=dict)
    uncounted: tuple[int, ...] = ()  # inputs that are written through `.data` alone


def capture(
    fn: Callable,
    fakes: list[object],
    names: list[str],
    keep: Keep,
    builder: Builder,
    locate: bool = True,
    close: bool = False,
    enables_grad: bool = False,
) -> Captured:
    """Record `fn(*fakes)`; outputs that share memory with an input are described, not computed.

    With `close`, the caller makes further inputs of the tensors closed over: they may be written, and outputs may be
    views of them. With `enables_grad`, `fn` runs under no_grad. The caller turns gradients on around it, so that the
    equations that it runs without them are marked.
    """
    recorder = Recorder(builder, keep, locate)
    with kept_grad_mode() as left:
        run = under_no_grad(fn, left) if enables_grad else fn
        recorded = record_with(recorder, run, fakes, names, writes_closed=close)
    record_assumptions(builder)
    histories = _Histories(recorded, recorder.base_grad)
    _drop_empty_histories(recorded, histories)
    closed = tuple(recorded.trace.constants.values()) if close else ()
    aliased, bases = aliases(recorded, closed, builder, histories)
    placed = _placed(recorded, [*recorded.outputs, *(base.tensor for base in bases)], (*recorded.inputs, *closed))
    pairs = enumerate(zip(recorded.trace.outputs, recorded.outputs, strict=True))
    outputs = [v if i in aliased else _laid_out(builder, v, x, recorded.refs) for i, (v, x) in pairs]
    homes = {id(x): v for v, x in zip(outputs, recorded.outputs, strict=True)}
    homes |= {id(base.tensor): _laid_out(builder, base.read(builder), base.tensor, recorded.refs) for base in bases}
    bases = [homes[id(base.tensor)] for base in bases]
    outputs = [_at_home(builder, v, x, recorded.refs, homes) for v, x in zip(outputs, recorded.outputs, strict=True)]
    numbers = dict.fromkeys(values_in([alias.steps for alias in aliased.values()]))
    unseen = written_unseen(builder.equations, recorded.trace.mutations)  # what they hold now brings no history
    detached = {v: builder.emit(torch.ops.aten.detach.default, recorded.trace.mutations[v]) for v in unseen}
    mutations = {v: detached.get(v, new) for v, new in recorded.trace.mutations.items()}
    trace = numbers_as_values(recorded.trace.with_(outputs=(*outputs, *bases, *numbers), mutations=mutations), builder)
    grads = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in fakes)
    forget_tensors(builder.mode)
    after = left[0] if left else None
    results = len(recorded.outputs)
    return Captured(trace, recorded.spec, builder.mode, results, aliased, grads, after, enables_grad, placed)


class _Histories:
    """The values that autograd follows, asked for where a view was made under no_grad or behind `detach`. Without grad
    mode around the program there are none."""

    def __init__(self, recorded: Recorded, grad: bool) -> None:
        self.recorded, self.grad = recorded, grad

    @cached_property
    def values(self) -> set[Value]:
        trace, inputs = self.recorded.trace, self.recorded.inputs
        tensors = (*zip(trace.inputs, inputs, strict=True), *trace.constants.items())
        return with_history(tensors, trace.equations) if self.grad else set()


def aliases(
    recorded: Recorded,
    closed: Sequence[object] = (),
    builder: Builder | None = None,
    histories: _Histories | None = None,
) -> tuple[dict[int, Aliased], list[Ref]]:
    """Outputs that are views of an input or of one result, and such results that are no outputs themselves. `closed`
    are tensors that become inputs after the others. With `builder`, the program may be made to give numbers too."""
    inputs = [x for x in (*recorded.inputs, *closed) if isinstance(x, torch.Tensor)]
    aliased = _input_aliases([*recorded.inputs, *closed], recorded.outputs, recorded.refs, builder)
    given = {id(recorded.refs[id(x)].root) for x in inputs}
    bases = _shared_bases(recorded.outputs, recorded.refs, aliased, given, builder, histories)
    _share(aliased, recorded)
    return aliased, bases


def _share(aliased: dict[int, Aliased], recorded: Recorded) -> None:
    """Objects that are made once: outputs, of which others may be views, and detached tensors, since whoever writes a
    view of one gives it a history."""
    first: dict[int, tuple[int, int]] = {}
    for i, alias in sorted(aliased.items(), key=lambda item: (len(item[1].steps), item[0])):
        ref, end = recorded.refs[id(recorded.outputs[i])], len(alias.steps)
        detached = max((k + 1 for k, step in enumerate(alias.steps) if op_name(step[0]) == "detach"), default=end)
        # What it shows was written since: autograd makes it again, of its base.
        unwritten = ref.value is ref.begun and ref.version == ref.root.version
        for k in range(end, 0, -1):
            earlier = first.setdefault(id(ref), (i, k))
            whole = unwritten and earlier[1] == len(aliased[earlier[0]].steps)
            if earlier[0] != i and alias.shared is None and (whole or k >= detached):
                alias = aliased[i] = replace(alias, shared=earlier)
            assert ref.view is not None
            ref = ref.view.parent


def _input_aliases(
    inputs: Sequence[object], outputs: list[object], refs: dict[int, Ref], builder: Builder | None
) -> dict[int, Aliased]:
    by_root = {id(refs[id(x)].root): i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    aliased = {}
    for position, out in enumerate(outputs):
        if isinstance(out, torch.Tensor) and id(refs[id(out)].root) in by_root:
            source = by_root[id(refs[id(out)].root)]
            ref = refs[id(out)]
            # Made outside, where autograd looks on: who writes the view later writes the input's history.
            base, steps = _climb(ref, numbers=builder)
            given = refs[id(inputs[source])].tensor
            if base.tensor is given:
                aliased[position] = Aliased(source, steps)
    return aliased


def _shared_bases(
    outputs: list[object],
    refs: dict[int, Ref],
    aliased: dict[int, Aliased],
    given: Collection[int],
    builder: Builder | None,
    histories: _Histories | None,
) -> list[Ref]:
    """Note outputs that are views of one result; give results that are not outputs themselves. `given` are the ids of
    the inputs' roots: what the program itself makes of an input is left to it, unless that has a history of its own.

    One view alone is a value of the program, unless it was written: its new contents have a layout of their own. Or it
    was made under no_grad of what has a history: it requires gradients and has none, which only autograd can make.
    """
    groups: dict[int, list[int]] = {}
    climbs: dict[int, tuple[Ref, tuple[Step, ...]]] = {}
    for position, out in enumerate(outputs):
        if isinstance(out, torch.Tensor) and position not in aliased:
            ref = refs[id(out)]
            base, steps = climbs[position] = _climb(ref, numbers=builder)
            if base.view is None or base.own_history or id(base.root) not in given:
                groups.setdefault(id(base), []).append(position)
    extra: list[Ref] = []
    for members in groups.values():
        base, steps = climbs[members[0]]
        alone = len({id(outputs[m]) for m in members}) < 2 and not base.root.version
        cut = histories is not None and any(no_grad for *_, no_grad in steps) and base.value in histories.values
        if alone and not cut:
            continue
        home = next((m for m in members if outputs[m] is base.tensor), None)
        climbed = {m: steps for m in members if (steps := climbs[m][1])}
        if home is None and climbed:
            home = len(outputs) + len(extra)
            extra.append(base)
        for m, steps in climbed.items():
            aliased[m] = Aliased(home, steps, of_output=True)  # type: ignore[arg-type]
    return extra


def _placed(recorded: Recorded, outputs: Sequence[object], inputs: Sequence[object]) -> dict[int, Aliased]:
    """Where views of inputs lie that have a history of their own, once something was written there."""
    places = {id(recorded.refs[id(x)]): i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    placed = {}
    for position, out in enumerate(outputs):
        ref = recorded.refs[id(out)] if isinstance(out, torch.Tensor) else None
        if ref is not None and ref.own_history and ref.root.version:
            owner, steps = _climb(ref, start=True)
            if id(owner) in places:
                placed[position] = Aliased(places[id(owner)], steps)
    return placed


def _laid_out(builder: Builder, v: object, tensor: object, refs: dict[int, Ref]) -> object:
    """A written tensor keeps its strides. What is scattered into it may come with others."""
    if not isinstance(v, Value) or not isinstance(tensor, torch.Tensor) or not refs[id(tensor)].root.version:
        return v
    return laid_as(builder, v, tensor)


def _at_home(builder: Builder, v: object, tensor: object, refs: dict[int, Ref], homes: dict[int, object]) -> object:
    """A part of another result that has a history of its own lies in that one's memory all the same."""
    ref = refs[id(tensor)] if isinstance(tensor, torch.Tensor) else None
    if ref is None or not isinstance(v, Value) or not (ref.own_history and ref.root.version):
        return v
    base, steps = _climb(ref, start=True)
    home = homes.get(id(base.tensor))
    whole = all(op_name(op) == "detach" for op, *_ in steps)  # it holds what its base holds
    if not isinstance(home, Value) or base.view is not None or whole:
        return v
    with builder:
        part: Value = home
        for op, args, kwargs, index, _ in steps:
            made = builder.emit(op, part, *args, **kwargs)
            part = made if index is None else made[index]  # type: ignore[index,assignment]
        return keep_grad(v, part, tangent=True)


def numbers_as_values(trace: Trace, builder: Builder) -> Trace:
    """Symbolic numbers among the outputs become values, so that outputs are values or plain constants."""
    outputs = [_number(builder, o) if isinstance(o, SYMBOLIC) else o for o in trace.outputs]
    return trace.with_(equations=tuple(builder.equations), outputs=tuple(outputs))


def _climb(ref: Ref, start: bool = False, numbers: Builder | None = None) -> tuple[Ref, tuple[Step, ...]]:
    """The views that lead to this tensor, and the tensor that they start from. That is where the memory begins, or
    where a view needs a value of the program, or a symbolic size, which only the program computes: it then makes the
    view itself, unless it can be asked for `numbers`. It also makes a detached view that has a gradient history of its
    own, which no view of its base has; with `start`, the way starts at such a view."""
    steps: list[Step] = []
    while (view := ref.view) is not None:
        args = _sizes_left_open(view.op, view.args)
        kwargs = view.kwargs
        if numbers is not None and symbols_in((args, kwargs)):
            args, kwargs = pytree.tree_map_only(SYMBOLIC, partial(_number, numbers), (args, kwargs))
        own = ref.own_history and not (start and not steps)
        unknown = any(numbers is None or isinstance(v.type, TensorType) for v in values_in((args, kwargs)))
        if own or unknown or symbols_in((args, kwargs)):
            break
        steps.append((view.op, args, kwargs, view.index, view.no_grad))
        ref = view.parent
    return ref, tuple(reversed(steps))


def _number(builder: Builder, size: object) -> Value:
    return builder.record(NUMBER, (size,), {}, type_of(size))  # type: ignore[return-value,arg-type]


def _sizes_left_open(op: OpOverload, args: tuple) -> tuple:
    """A new shape in which one size is symbolic, without it: the others tell that one."""
    if op_name(op) not in ("view", "reshape", "_unsafe_view") or not isinstance(args[0], (list, tuple)):
        return args
    sizes = [-1 if isinstance(n, (torch.SymInt, Value)) else n for n in args[0]]
    return args if 0 in sizes or sizes.count(-1) != 1 else (sizes, *args[1:])


def written_unseen(equations: Iterable[Equation], mutations: dict[Value, Value]) -> list[Value]:
    """The inputs that were written where autograd does not look: each keeps the history it has."""
    kept: dict[object, object] = {v: e.args[0] for e in equations if e.op is KEEP_GRAD for v in e.results()}
    unseen = []
    for target, new in mutations.items():
        origin: object = new
        while origin in kept:
            origin = kept[origin]
        if origin is target:
            unseen.append(target)
    return unseen


def _drop_empty_histories(recorded: Recorded, histories: _Histories) -> None:
    """A detached view into which nothing with a gradient was written is a view like any other."""
    for ref in [ref for ref in recorded.refs.values() if ref.own_history]:
        ref.own_history = ref.value in histories.values
