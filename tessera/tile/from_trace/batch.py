"""Many regions of one form as one launch.

In: regions that compute the same, element by element, over buffers of different lengths. Out: a callable for all of
them together. The kernel is made once, over a flat axis whose length is a symbol; a target that can runs all segments
in one launch, another runs the kernel segment by segment. A region qualifies if all its tensors have one dense layout,
or no dimensions at all (numbers on the device), and its equations say nothing about sizes. A region of numbers alone,
such as a counter that is increased, is a segment of length one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from xdsl.dialects.builtin import ArrayAttr, IndexType, StringAttr

from tessera.ir import fake
from tessera.ir.equation import Arg, Value
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.tile.dialect.index import name
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.dialect.overwrite import overwrites
from tessera.tile.dialect.types import AxisAttr, index_attr
from tessera.tile.from_trace.kernel import TileKernel
from tessera.tile.from_trace.lower.rule import POINTWISE, SOURCE
from tessera.tile.from_trace.region import Lowered, kind_of, lower, why_not
from tessera.tile.from_trace.segments import OneByOne, Segment, launcher
from tessera.tile.targets.autotune import choose
from tessera.tile.targets.base import Batches, Run, Target

LENGTH = 4096  # a length to lower with; the kernel does not remember it
VECTOR = 16  # elements: segments of whole vectors are launched apart from others
SYMBOL = "length"


def form(body: Trace) -> tuple | None:
    """What regions must have in common to be one launch; None where this one cannot be part of any."""
    layout = _layout(body)
    if layout is None:
        return None
    number: dict[Value, int] = {}
    parts: list[object] = [prod(layout[0]) % VECTOR == 0]

    def key(a: Arg) -> object:
        return ("value", number[a]) if isinstance(a, Value) else fake.argument_key(a)

    for v in body.inputs:
        number[v] = len(number)
        parts.append((v.dtype, v.tensor.device, v.ndim == 0))
    for eqn in body.equations:
        parts.append((eqn.op, tuple(map(key, eqn.args)), tuple((k, key(a)) for k, a in eqn.kwargs.items())))
        for v in eqn.results():
            number[v] = len(number)
            parts.append((v.dtype, v.ndim == 0))
    return (*parts, tuple(number[v] for v in body.outputs))  # type: ignore[index]


def _layout(body: Trace) -> tuple[tuple, tuple] | None:
    """The one shape and strides of all tensors with dimensions, where there is one and it is dense; of numbers alone,
    theirs."""
    values = list(body.values())
    if body.symbols or body.constants or not all(isinstance(v.type, TensorType) for v in values):
        return None
    if any(v.tensor.is_symbolic for v in values):
        return None
    layouts = {(v.tensor.shape, v.tensor.stride) for v in values if v.ndim} or {((), ())}
    if len(layouts) != 1:
        return None
    shape, stride = layouts.pop()
    extent = 1
    for step, size in sorted((t, s) for s, t in zip(shape, stride, strict=True) if s != 1):
        if step != extent:
            return None
        extent = step * size
    for eqn in body.equations:
        if why_not(eqn) or kind_of(eqn) not in (POINTWISE, SOURCE) or len(eqn.results()) != 1:
            return None
        if any(isinstance(a, (list, tuple)) for a in (*eqn.args, *eqn.kwargs.values())):
            return None
    outputs = all(isinstance(v, Value) and v.ndim == len(shape) for v in body.outputs)
    return (shape, stride) if outputs and body.outputs else None  # type: ignore[return-value]


def flat_kernel(body: Trace, title: str) -> Lowered:
    """The kernel of such a region over one axis, whose length is the symbol `length`."""
    flattened: dict[Value, Value] = {}
    numbers = not any(v.ndim for v in body.values())

    def flat(v: Value) -> Value:
        if v not in flattened:
            t = v.tensor
            flattened[v] = (
                v if not v.ndim and not numbers else Value(v.name, TensorType(t.dtype, (LENGTH,), (1,), t.device))
            )
        return flattened[v]

    inputs = tuple(map(flat, body.inputs))
    equations = tuple(
        eqn.substitute({v: flat(v) for v in eqn.inputs()}).with_(outputs=tuple(map(flat, eqn.results())))
        for eqn in body.equations
    )
    outputs = tuple(flat(v) for v in body.outputs)  # type: ignore[arg-type]
    lowered = lower(Trace(body.name, inputs, equations, outputs), title)
    back = {b: a for a, b in flattened.items()}
    return Lowered(
        tuple(back[v] for v in lowered.inputs),
        tuple(back[v] for v in lowered.stored),
        (SYMBOL,),
        lowered.tail,
        _of_any_length(lowered.kernel),
        lowered.cost,
    )


def _of_any_length(kernel: KernelOp) -> KernelOp:
    (axis,) = kernel.axes.data
    assert axis.size.expr.constant == LENGTH, "a flat kernel has one axis, over all elements"
    copy = kernel.clone()
    copy.properties["axes"] = ArrayAttr([AxisAttr(axis.axis, axis.kind, index_attr(name(SYMBOL)))])
    copy.properties["symbol_names"] = ArrayAttr([StringAttr(SYMBOL)])
    copy.block.insert_arg(IndexType(), len(copy.block.args))
    copy.verify()
    return copy


def batch(whole: Trace, bodies: Sequence[Trace], target: Target) -> TileKernel | None:
    """One kernel for all these regions, over the inputs and outputs of the region `whole` that they make up."""
    lowered = flat_kernel(bodies[0], bodies[0].name)
    if lowered.tail or len(lowered.stored) != len(bodies[0].outputs):
        return None
    places = {v: i for i, v in enumerate(whole.inputs)}
    results = {v: i for i, v in enumerate(whole.outputs)}
    segments = tuple(_segment(body, bodies[0], lowered, places, results) for body in bodies)
    longest = max(s.length for s in segments)
    schedule = choose(target, lowered.kernel, {SYMBOL: longest})
    run: Run
    if isinstance(target, Batches):
        run = target.batch(lowered.kernel, schedule)
    else:
        run = OneByOne(target.compile(lowered.kernel, schedule))
    inputs, offered = len(lowered.inputs), overwrites(lowered.kernel)

    def tile_kernel(over: dict[int, int], **offers: Any) -> TileKernel:
        launch = launcher(whole, segments, run, over)
        return TileKernel(
            run=launch, body=whole, lowered=lowered, schedule=schedule, compiled=run, segments=segments, **offers
        )

    may = {
        s.outputs[k - inputs]: tuple(s.inputs[j] for j in reads if j < inputs)
        for s in segments
        for k, reads in offered.items()
    }
    return tile_kernel({}, overwrites=may, writing=tile_kernel)


def _segment(body: Trace, first: Trace, lowered: Lowered, places: dict, results: dict) -> Segment:
    """The buffers of the first region's kernel, in this one."""
    values = list(body.values())
    mine = dict(zip(first.values(), values, strict=True))
    shape = next((v.shape for v in values if v.ndim), ())
    return Segment(
        tuple(places[mine[v]] for v in lowered.inputs), tuple(results[mine[v]] for v in lowered.stored), prod(shape)
    )
