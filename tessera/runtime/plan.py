"""How a compiled graph's results line up with what its caller gave and gets.

In: what capture, differentiation and the split say. Out: the core of a captured trace, without outputs that are made of
inputs outside; the `Layout` that puts its results in order for the caller; the `Bridge` of a forward and a backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tessera.frontends.captured import Captured
from tessera.ir.aliased import Aliased
from tessera.ir.equation import APART, NO_GRAD, Equation, Value, values_in
from tessera.ir.schema import is_view
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ir.writing import BATCH_NORM
from tessera.ops.custom import AUTOGRAD_FUNCTION, Deferred
from tessera.passes.clean.cse import key_of
from tessera.passes.clean.known import Given
from tessera.passes.memory.alias import roots
from tessera.runtime.autograd import Bridge, edges_to
from tessera.runtime.call import Layout
from tessera.runtime.linked import Level
from tessera.runtime.links import Made, as_written, between, computed, links_of
from tessera.torch_internals.operators import OpOverload, op_name
from tessera.transforms.halves import Split
from tessera.transforms.vjp import Joint, vjp
from tessera.util.names import names

_SAVED = "saved_"  # how names of what was saved begin, in the graph of a backward


def core_of(trace: Trace, captured: Captured) -> Trace:
    """The trace without outputs that are made from the inputs outside, each other output once."""
    return trace.with_(outputs=tuple(computed(replace(captured, trace=trace))))


def places_of(captured: Captured, core: Trace, results: Sequence[Value]) -> dict[Value, int]:
    """Of each output that the core computes, its place among the results: names link them to the core's outputs."""
    position = {v.name: i for i, v in enumerate(results)}
    pairs = zip(computed(captured), core.outputs, strict=False)
    return {out: position[of_core.name] for out, of_core in pairs}  # type: ignore[union-attr]


def layout_of(captured: Captured, core: Trace, results: list[Value], write_back: dict[Value, Value]) -> Layout:
    """`results` are what the core gives, in order; names link them to the caller's outputs."""
    position = {v.name: i for i, v in enumerate(results)}
    places = places_of(captured, core, results)
    parts: list[object] = []
    for i, out in enumerate(captured.trace.outputs[: captured.outputs]):
        if (alias := captured.aliased.get(i)) is not None:
            source = captured.trace.outputs[alias.source] if alias.of_output else None
            alias = alias.with_places(places)
            parts.append(alias if source is None else replace(alias, source=places[source]))  # type: ignore[index]
        elif isinstance(out, Value):
            parts.append(places[out])
        else:
            parts.append(("constant", out))
    inputs = {v: i for i, v in enumerate(captured.trace.inputs)}
    written = tuple(inputs[v] for v in captured.trace.mutations)
    outside = tuple((inputs[t], position[v.name]) for t, v in write_back.items())
    uncounted = {*(source for source, _ in outside), *captured.uncounted}
    uncounted |= {inputs[v] for v in running_statistics(captured.trace)}
    counted = tuple(i for i in written if i not in uncounted)
    fixed = all(isinstance(v.type, TensorType) and not v.type.is_symbolic for v in captured.trace.inputs)
    placed = tuple((places[captured.trace.outputs[i]], alias) for i, alias in captured.placed.items())  # type: ignore[index]
    return Layout(tuple(parts), outside, written, counted, fixed, placed, _viewed(captured))


def without_linked(layout: Layout, plan: Bridge) -> Layout:
    """The layout where the bridge makes some of the views, and writes some of the inputs."""
    places = {output: plan.results + k for k, output in enumerate(plan.viewed)}
    outputs = tuple(places.get(i, part) for i, part in enumerate(layout.outputs))
    return replace(layout, outputs=outputs, write_back=tuple(w for w in layout.write_back if w not in plan.written))


def running_statistics(trace: Trace) -> set[Value]:
    """The inputs that batch norms alone write. Their kernels do not count it: a module may run twice before a backward
    whose saved tensors hold its statistics."""
    normed: dict[object, object] = {}  # new statistics -> what they were
    detached: dict[object, object] = {}
    for eqn in trace.equations:
        if eqn.op is BATCH_NORM:
            normed |= dict(zip(eqn.outputs[3:], eqn.args[3:5], strict=True))
        elif eqn.opname == "detach":
            detached[eqn.out] = eqn.args[0]
    before = normed | detached

    def written_by_norms(target: Value, now: object) -> bool:
        norms = 0
        while now in before:
            norms += now in normed
            now = before[now]
        return now is target and norms > 0

    return {target for target, new in trace.mutations.items() if written_by_norms(target, new)}


def _viewed(captured: Captured) -> tuple[int, ...]:
    """Inputs that require gradients, of which the program makes views under no_grad. Views of what it wrote before may
    be of any input that it writes."""
    inputs = zip(captured.trace.inputs, captured.requires_grad, strict=False)
    origin = {v: i for i, (v, wanted) in enumerate(inputs) if wanted}
    written = {i for v, i in origin.items() if v in captured.trace.mutations}
    viewed: set[int] = set()
    for eqn in captured.trace.equations:
        if eqn.inputs() and is_view(eqn.op):
            source = origin.get(eqn.inputs()[0])
            if source is not None:
                origin.update(dict.fromkeys(eqn.results(), source))
            if NO_GRAD in eqn.tags:
                viewed |= written if source is None else {source}
    return tuple(sorted(viewed))


def bridge_of(
    captured: Captured,
    joint: Joint,
    split: Split,
    results: list[object],
    given: tuple[Given, ...] = (),
    linked: bool = False,
    edited: bool = False,
    written: tuple[tuple[int, int], ...] = (),
) -> Bridge:
    """`results` are the caller's, each once. `linked`: whether they are to know of each other. `edited`: the program is
    another one than was captured. `written`: inputs that get a result outside."""
    position = {v: i for i, v in enumerate(results)}
    pulled = tuple(position[v] for v in joint.pulled)
    outputs = _outputs(joint, results)
    passive = tuple(i for i, v in enumerate(results) if i not in pulled and isinstance(v, Value))
    inputs = {v: i for i, v in enumerate(joint.trace.inputs)}
    tensors = tuple(i for i, v in enumerate(split.saved) if isinstance(v.type, TensorType))
    numbers = tuple(i for i, v in enumerate(split.saved) if not isinstance(v.type, TensorType))
    influences, saved, cut = _influences(joint, split, given), set(split.saved), _cut(joint)
    wanted = [v for v in joint.wrt if inputs[v] not in cut]
    links = links_of(captured, outputs, len(results), set(pulled), written, plain=edited) if linked else Made()
    return Bridge(
        len(results),
        passive,
        pulled,
        tuple(inputs[v] for v in joint.wrt),
        len(captured.trace.inputs),
        tensors,
        numbers,
        tuple(inputs.get(v, -1) for v in split.saved),
        tuple(inputs[v] for v in wanted if v not in saved and v in influences),
        _lent(joint, {*saved, *wanted}),
        _reached(joint),
        cut,
        edges(captured.trace.inputs),
        _merges(joint),
        _contiguous(joint),
        _shares(split, len(results), tensors, set(inputs)),
        outputs,
        links.links,
        links.views,
        links.viewed,
        links.written,
        bool(given),
    )


def _outputs(joint: Joint, results: Sequence[object]) -> tuple[int, ...]:
    position = {v.name: i for i, v in enumerate(results) if isinstance(v, Value)}
    outputs = joint.trace.outputs[: len(joint.trace.outputs) - len(joint.wrt)]
    return tuple(position[o.name] if isinstance(o, Value) else -1 for o in outputs)


def _lent(joint: Joint, held: set[Value]) -> tuple[int, ...]:
    """Tensors that the program does not write, without those that are held anyway."""
    held = {*held, *joint.trace.mutations}
    own = joint.trace.inputs[: len(joint.trace.inputs) - len(joint.pulled)]
    return tuple(i for i, v in enumerate(own) if isinstance(v.type, TensorType) and v not in held)


def _shares(
    split: Split, count: int, tensors: tuple[int, ...], inputs: set[Value]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """What is saved and lies in the memory of results, as the base of a view that is given back. Results that are views
    of inputs are made outside, and are not meant."""
    memory, outputs = roots(split.forward), split.forward.outputs[:count]
    pairs = []
    for k, position in enumerate(tensors):
        v = split.saved[position]
        if v in inputs or v not in memory:
            continue
        shared = [i for i, o in enumerate(outputs) if isinstance(o, Value) and o is not v and memory[o] & memory[v]]
        if shared:
            pairs.append((k, tuple(shared)))
    return tuple(pairs)


def _contiguous(joint: Joint) -> tuple[int, ...]:
    """Cotangents whose types lie otherwise than their results: symbolic strides may overlap, for all one knows."""
    cts = joint.trace.inputs[len(joint.trace.inputs) - len(joint.pulled) :]
    pairs = zip(joint.pulled, cts, strict=True)
    return tuple(i for i, (v, ct) in enumerate(pairs) if not v.tensor.lies_like(ct.tensor))


def _reached(joint: Joint) -> tuple[tuple[int, ...], ...]:
    """The cotangents that each gradient is made of: autograd gives none where all of them are missing."""
    behind = _behind(joint)
    gradients = joint.trace.outputs[len(joint.trace.outputs) - len(joint.wrt) :]
    return tuple(tuple(sorted(behind.get(g, ()))) if isinstance(g, Value) else () for g in gradients)


def _behind(joint: Joint) -> dict[Value, frozenset[int]]:
    """The cotangents that values are made of, by their numbers."""
    first = len(joint.trace.inputs) - len(joint.pulled)
    behind: dict[Value, frozenset[int]] = {v: frozenset((k,)) for k, v in enumerate(joint.trace.inputs[first:])}
    for e in joint.trace.equations:
        if cotangents := frozenset[int]().union(*(behind.get(v, ()) for v in e.inputs())):
            behind.update(dict.fromkeys(e.results(), cotangents))
    return behind


def _merges(joint: Joint) -> tuple[tuple[tuple[int, ...], ...] | None, ...]:
    """Of each cotangent, what it is added to before anything is computed of it: the cotangents that each of those
    gradients is made of. None where something is computed of it alone, or a user's function may look whether it
    came."""
    first = len(joint.trace.inputs) - len(joint.pulled)
    cts = joint.trace.inputs[first:]
    behind, looked_at = _behind(joint), _looked_at(joint)
    merged: list[tuple[tuple[int, ...], ...] | None] = []
    for v, ct in zip(joint.pulled, cts, strict=True):
        if v in looked_at:
            merged.append(None)
            continue
        alone, merges = {ct}, []
        for e in joint.trace.equations:
            reads = [v for v in e.inputs() if v in alone]
            if len(reads) == 1 and e.op == torch.ops.aten.add.Tensor and len(e.inputs()) == 2:
                merges += [tuple(sorted(behind.get(v, ()))) for v in e.inputs() if v not in alone]
            elif reads and len(e.inputs()) == 1 and isinstance(e.op, OpOverload) and op_name(e.op) in _MOVES:
                alone.update(e.results())
            elif reads:
                break
        else:
            merged.append(tuple(merges))
            continue
        merged.append(None)
    return tuple(merged)


def _looked_at(joint: Joint) -> set[Value]:
    """Results whose cotangents come to functions of a user's that look which ones there are."""
    made: set[Value] = set()
    for e in joint.trace.equations[: joint.split]:
        looks = e.op is AUTOGRAD_FUNCTION and any(isinstance(a, Deferred) for a in e.args)
        if looks or not made.isdisjoint(e.inputs()):
            made.update(e.results())
    return made


# What makes of zeros nothing but zeros, whatever else the program holds.
_MOVES = names(
    "view reshape permute transpose t expand unsqueeze squeeze slice select alias detach clone contiguous _to_copy sum"
    " neg _unsafe_view"
)


def _cut(joint: Joint) -> tuple[int, ...]:
    """Inputs that get no gradient, which autograd is not to see. Where that is all of them it sees them nevertheless: a
    view made under no_grad requires a gradient that goes nowhere."""
    inputs = {v: i for i, v in enumerate(joint.trace.inputs)}
    gradients = joint.trace.outputs[-len(joint.wrt) :]
    cut = tuple(inputs[v] for v, g in zip(joint.wrt, gradients, strict=True) if g is None)
    return cut if len(cut) < len(joint.wrt) else ()


def backward_graph(
    captured: Captured,
    core: Trace,
    plan: Bridge,
    kept: tuple[Trace, tuple[Value, ...]],
    wanted: tuple[bool | None, ...],
    again: bool,
    level: Level | None,
    name: str,
    edited: bool,
) -> tuple[Captured, Given, tuple[int, ...]]:
    """The backward as a graph of its own: gradients as functions of the inputs, what was saved, and cotangents.

    Also which of the cotangents that are there it takes. `wanted` says which of them need gradients themselves, None
    which are missing; `again`, whether its results do. With a level, it goes from those results to what they are made
    of, in the program as it was written, unless a user has `edited` it since.

    It computes the forward too, from the inputs, since the gradients' own gradients lead through it; what was saved is
    put in place of what is computed again (`passes/clean/known.py`) once it has been differentiated.
    """
    inputs = list(core.inputs)
    missing = [i for i, w in enumerate(wanted) if w is None]
    wrt = [inputs[i] for i in plan.wrt]
    if level is None:
        joint = vjp(core, wrt, captured.mode, again=again, missing=missing)
        taken = tuple(range(len(joint.pulled)))
        assert len(taken) + len(missing) == len(plan.pulled), "expected as many cotangents as the backward program has"
    else:
        if edited:
            of = {p: [v] for p, v in zip(plan.outputs, core.outputs, strict=False) if isinstance(v, Value)}
        else:
            core, of = as_written(captured, plan.outputs, plan.viewed, plan.results, plan.written)
        outer = [of[p][0] for p, w in zip(level.results, wanted, strict=True) if w is not None]
        joint = between(core, wrt, outer, [of[p] for p in level.inner], captured.mode, again)
        taken = tuple(joint.trace.outputs.index(v) for v in joint.pulled)
    cts = joint.trace.inputs[len(inputs) :]
    program, saved = kept
    names = {v.name for v in inputs}
    brought = tuple(v if i >= 0 else _saved(v, names) for v, i in zip(saved, plan.own, strict=True))
    extra = tuple(v for v, i in zip(brought, plan.own, strict=True) if i < 0)
    known = {*extra, *cts, *(inputs[i] for i in plan.own if i >= 0)}
    every = (*inputs, *extra, *cts)
    trace = joint.trace.with_(
        name=name,
        inputs=every,
        equations=joint.trace.equations if again else _apart(joint, values_in(core.outputs)),
        outputs=joint.trace.outputs[len(joint.trace.outputs) - len(joint.wrt) :],
        mutations={},
        symbols=joint.trace.symbols | _sizes([v for v in every if v in known]),
    )
    influences: set[int] = {*plan.own, *plan.unsaved} & {*plan.wrt} if again else set()
    there = [w for w in wanted if w is not None]
    grads = (
        *(i in influences for i in range(len(inputs))),
        *(False for _ in extra),
        *(there[k] for k in taken),
    )
    aliased = {i: Aliased(every.index(g), ()) for i, g in enumerate(trace.outputs) if g in cts}
    graph = Captured(trace, captured.spec, captured.mode, len(trace.outputs), aliased, grads)
    return graph, Given(program, saved, brought), taken


def _saved(v: Value, taken: set[str]) -> Value:
    """An input that brings what an earlier program saved; that one's inputs may have been saved before it."""
    name = _SAVED + v.name
    while name in taken:
        name = _SAVED + name
    return Value(name, v.type)


def _apart(joint: Joint, results: list[Value]) -> tuple[Equation, ...]:
    """The equations, where gradients compute by themselves what is equal to a result: the caller may have written that
    one since."""
    forward, backward = joint.trace.equations[: joint.split], joint.trace.equations[joint.split :]
    taken = {_computes(e) for e in forward if any(v in results for v in e.results())}
    return *forward, *(e.with_(tags=e.tags | {APART}) if _computes(e) in taken else e for e in backward)


def _computes(eqn: Equation) -> tuple:
    return eqn.op, key_of(eqn.args), key_of(eqn.kwargs)


def _sizes(values: list[Value]) -> dict[str, tuple[Value, int | None]]:
    """Where symbolic sizes can be read off."""
    sizes: dict[str, tuple[Value, int | None]] = {}
    for v in values:
        if isinstance(v.type, TensorType):
            for dim, size in enumerate(v.type.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    sizes.setdefault(str(size.node.expr), (v, dim))
        elif v.name.startswith(_SAVED):
            name = v.name
            while name.startswith(_SAVED):
                name = name.removeprefix(_SAVED)
            sizes[name] = (v, None)
    return sizes


def positions_read(trace: Trace) -> frozenset[int]:
    """Inputs whose contents the program wants."""
    read = {*(v for eqn in trace.equations for v in eqn.inputs()), *values_in(trace.outputs)}
    return frozenset(i for i, v in enumerate(trace.inputs) if v in read)


def edges(inputs: Sequence[Value]) -> tuple[int, ...]:
    return edges_to(isinstance(v.type, TensorType) for v in inputs)


def _influences(joint: Joint, split: Split, given: tuple[Given, ...]) -> set[Value]:
    """What the saved values depend on: gradients change with it. What they are tied to counts, too."""
    influences = {*joint.tied, *(v for v in split.saved if _floats(v))}
    _add_operands(influences, joint.trace)
    _add_operands(influences, split.forward)
    for one in reversed(given):
        influences.update(v for v, x in zip(one.kept, one.inputs, strict=True) if x in influences)
        _add_operands(influences, one.program)
    return influences


def _add_operands(influences: set[Value], trace: Trace) -> None:
    for eqn in reversed(trace.equations):
        if any(v in influences for v in eqn.results()):
            influences.update(v for v in eqn.inputs() if _floats(v))


def _floats(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.is_differentiable
