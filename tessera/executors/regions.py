"""Regions of a trace: finding convex ones, and turning each into one equation.

A region is convex if no path leaves it and comes back; only then can its equations run as one. `partition`
grows regions along data flow from the equations an executor wants. `contract` replaces regions by single
equations and puts everything into an order that respects data, effects and writes. A region may take the views of
small tensors that it reads into its body (`with_views`): calling an operator for each costs the host more than that.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Collection

import torch

from tessera.executors.base import Region
from tessera.ir.equation import Equation, Special, Value, symbols_in
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.passes.clean.dce import mentioned
from tessera.passes.fuse.graph import Groups
from tessera.passes.memory.depend import dependencies, written
from tessera.torch_internals.operators import OpOverload

SMALL = 1 << 16  # elements
SMALL_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.unsqueeze.default, torch.ops.aten.squeeze.dim)


def partition(trace: Trace, wanted: Callable[[Equation], bool], least: int = 1) -> list[Region]:
    """Maximal convex regions of wanted equations that feed each other, with at least `least` equations."""
    needs = dependencies(trace)
    groups = Groups(needs)
    member: list[bool] = [False] * len(trace.equations)
    for index, eqn in enumerate(trace.equations):
        if has_effect(eqn) or written(eqn) or isinstance(eqn.op, Special) or not wanted(eqn):
            continue
        member[index] = True
        for need in sorted(needs[index], reverse=True):
            pair = {groups.of[index], groups.of[need]}
            if member[need] and len(pair) > 1 and groups.convex(pair):
                groups.join(pair)
    regions: dict[int, Region] = {}
    for index, inside in enumerate(member):
        if inside:
            regions.setdefault(groups.of[index], []).append(index)
    return [region for region in regions.values() if len(region) >= least]


@functools.lru_cache(maxsize=4)  # asked for every region of a trace
def _readers(trace: Trace) -> tuple[dict[Value, list[int]], frozenset[Value]]:
    """Which equations read each value, and the values that must be there whoever reads them."""
    readers: dict[Value, list[int]] = {}
    for i, eqn in enumerate(trace.equations):
        for v in dict.fromkeys(eqn.inputs()):
            readers.setdefault(v, []).append(i)
    return readers, frozenset((*trace.results(), *(v for v, _ in trace.symbols.values())))


def body_of(trace: Trace, region: Region, name: str) -> Trace:
    """The region as a trace of its own: inputs are what it reads, outputs what is read of it elsewhere."""
    inside = set(region)
    computed = {v for i in region for v in trace.equations[i].results()}
    equations = tuple(trace.equations[i] for i in region)
    reads = dict.fromkeys(v for eqn in equations for v in eqn.inputs() if v not in computed)
    readers, kept = _readers(trace)
    outputs = tuple(
        v for eqn in equations for v in eqn.results() if v in kept or any(i not in inside for i in readers.get(v, ()))
    )
    if not trace.symbols:
        return Trace(name, tuple(reads), equations, outputs)
    symbols = {s: where for s, where in trace.symbols.items() if where[0] in reads or where[0] in computed}
    missing = mentioned(tuple((e.args, e.kwargs) for e in equations)) - set(symbols)
    missing |= _untold(reads, computed) - set(symbols)
    brings = {s: trace.symbols[s] for s in sorted(missing) if s in trace.symbols}
    inputs = (*reads, *dict.fromkeys(v for v, _ in brings.values()))
    return Trace(name, inputs, equations, outputs, {}, {}, {**symbols, **brings})


def _untold(reads: Collection[Value], computed: Collection[Value]) -> set[str]:
    """Symbols in the sizes of tensors that no tensor a region reads has as a size of its own."""
    sizes = [[*v.type.shape, *v.type.stride] if isinstance(v.type, TensorType) else [] for v in (*reads, *computed)]
    known = {str(size) for own in sizes[: len(reads)] for size in own if not isinstance(size, int)}
    return symbols_in(sizes) - known


def small_views(trace: Trace, regions: list[Region]) -> dict[Value, Equation]:
    """Plain views of small values by what they give, those outside of all regions: what they show is in memory."""
    inside = {i for region in regions for i in region}
    symbols = {v for v, _ in trace.symbols.values()}
    return {
        eqn.out: eqn
        for i, eqn in enumerate(trace.equations)
        if i not in inside and _is_small_view(eqn) and eqn.out not in symbols
    }


def with_views(body: Trace, views: dict[Value, Equation]) -> Trace:
    """A region's body, with those views that it is given made inside."""
    added: dict[Equation, None] = {}

    def source(v: Value) -> Value:
        eqn = views.get(v)
        if eqn is None:
            return v
        root = source(eqn.inputs()[0])
        added.setdefault(eqn)
        return root

    inputs = dict.fromkeys(map(source, body.inputs))
    if not added:
        return body
    return body.with_(inputs=tuple(inputs), equations=(*added, *body.equations))


def _is_small_view(eqn: Equation) -> bool:
    if not isinstance(eqn.op, OpOverload) or eqn.op not in SMALL_VIEWS:
        return False
    before, after = eqn.inputs()[0].tensor, eqn.out.tensor
    return not before.is_symbolic and not after.is_symbolic and before.numel() <= SMALL


def contract(trace: Trace, claimed: list[tuple[Region, Special]]) -> Trace:
    """Replace each region by one equation that runs its Special, whose `body` names inputs and outputs."""
    needs = dependencies(trace)
    node = list(range(len(trace.equations)))
    fused: dict[int, Equation] = {}
    for region, special in claimed:
        body: Trace = special.body
        first = trace.equations[region[0]]
        for i in region:
            node[i] = region[0]
        fused[region[0]] = Equation(special, body.inputs, {}, body.outputs, True, first.source, first.tags)  # type: ignore[arg-type]
    after: dict[int, set[int]] = {}
    waits: dict[int, int] = {n: 0 for n in node}
    for i, need in enumerate(needs):
        for j in need:
            if node[i] != node[j] and node[i] not in after.setdefault(node[j], set()):
                after[node[j]].add(node[i])
                waits[node[i]] += 1
    ready = [n for n, count in waits.items() if count == 0]
    heapq.heapify(ready)
    order: list[Equation] = []
    while ready:
        n = heapq.heappop(ready)
        order.append(fused.get(n, trace.equations[n]))
        for follower in after.get(n, ()):
            waits[follower] -= 1
            if waits[follower] == 0:
                heapq.heappush(ready, follower)
    assert len(order) == len(waits), "a region was not convex"
    return _without_lost_symbols(trace.with_(equations=tuple(order)))


def _without_lost_symbols(trace: Trace) -> Trace:
    values = {*trace.values()}
    return trace.with_(symbols={s: where for s, where in trace.symbols.items() if where[0] in values})
