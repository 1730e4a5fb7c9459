"""How a compiled graph's results line up with what its caller gave and gets.

In: what capture, differentiation and the split say. Out: the core of a captured trace, without outputs that are made of
inputs outside; the `Layout` that puts its results in order for the caller; the `Bridge` of a forward and a backward.
"""

from __future__ import annotations

from dataclasses import replace

from tessera.frontends.captured import Captured
from tessera.ir.equation import Value
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.runtime.autograd import Bridge
from tessera.runtime.call import Layout
from tessera.transforms.remat import Split
from tessera.transforms.vjp import Joint


def core_of(trace: Trace, captured: Captured) -> Trace:
    """The trace without outputs that are made from the inputs outside, each other output once."""
    outputs = [o for i, o in enumerate(trace.outputs) if i not in captured.aliased and isinstance(o, Value)]
    return trace.with_(outputs=tuple(dict.fromkeys(outputs)))


def layout_of(captured: Captured, core: Trace, results: list[Value], write_back: dict[Value, Value]) -> Layout:
    """`results` are what the core gives, in order; names link them to the caller's outputs."""
    position = {v.name: i for i, v in enumerate(results)}
    core_outputs = iter(core.outputs)
    places: dict[Value, int] = {}
    for i, out in enumerate(captured.trace.outputs):
        if i not in captured.aliased and isinstance(out, Value) and out not in places:
            places[out] = position[next(core_outputs).name]  # type: ignore[union-attr]
    parts: list[object] = []
    for i, out in enumerate(captured.trace.outputs[: captured.outputs]):
        if (alias := captured.aliased.get(i)) is not None:
            source = captured.trace.outputs[alias.source] if alias.of_output else None
            parts.append(alias if source is None else replace(alias, source=places[source]))  # type: ignore[index]
        elif isinstance(out, Value):
            parts.append(places[out])
        else:
            parts.append(("constant", out))
    inputs = {v: i for i, v in enumerate(captured.trace.inputs)}
    written = tuple(inputs[v] for v in captured.trace.mutations)
    outside = tuple((inputs[t], position[v.name]) for t, v in write_back.items())
    inside = tuple(i for i in written if i not in {source for source, _ in outside})
    fixed = all(isinstance(v.type, TensorType) and not v.type.is_symbolic for v in captured.trace.inputs)
    return Layout(tuple(parts), outside, written, inside, fixed)


def bridge_of(captured: Captured, joint: Joint, split: Split, results: list[object]) -> Bridge:
    """`results` are the caller's, each once."""
    position = {v: i for i, v in enumerate(results)}
    pulled = tuple(position[v] for v in joint.pulled)
    passive = tuple(i for i, v in enumerate(results) if i not in pulled and isinstance(v, Value))
    inputs = {v: i for i, v in enumerate(joint.trace.inputs)}
    tensors = tuple(i for i, v in enumerate(split.saved) if isinstance(v.type, TensorType))
    numbers = tuple(i for i, v in enumerate(split.saved) if not isinstance(v.type, TensorType))
    return Bridge(
        len(results),
        passive,
        pulled,
        tuple(inputs[v] for v in joint.wrt),
        len(captured.trace.inputs),
        tensors,
        numbers,
        _reached(joint),
    )


def _reached(joint: Joint) -> tuple[tuple[int, ...], ...]:
    """The cotangents that each gradient is made of: autograd gives none where all of them are missing."""
    first = len(joint.trace.inputs) - len(joint.pulled)
    behind: dict[Value, frozenset[int]] = {v: frozenset((k,)) for k, v in enumerate(joint.trace.inputs[first:])}
    for e in joint.trace.equations:
        found = frozenset[int]().union(*(behind.get(v, ()) for v in e.inputs()))
        behind.update(dict.fromkeys(e.results(), found))
    gradients = joint.trace.outputs[len(joint.trace.outputs) - len(joint.wrt) :]
    return tuple(tuple(sorted(behind.get(g, ()))) if isinstance(g, Value) else () for g in gradients)
