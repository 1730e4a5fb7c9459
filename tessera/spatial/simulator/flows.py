"""What travels: routes checked, links held, and every send paired with those who receive it.

In: the steps and their work. Out: a `Flow` for each send, with the times at which its links are held and at which it
arrives; each recv knows its flow. With jitter a seeded delay within the machine's window moves what is held; nobody
receives at another time for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from tessera.machines.spatial import Core, Edge, SpatialMachine
from tessera.spatial.listing.types import Recv, Route, Send
from tessera.spatial.simulator.violation import Step, Violation
from tessera.spatial.simulator.work import Work


class Held(NamedTuple):
    source: Core
    target: Core
    begin: int
    end: int


@dataclass
class Flow:
    send: Work
    held: list[Held] = field(default_factory=list)
    arrivals: dict[Core, tuple[int, str]] = field(default_factory=dict)  # the cycle and the unit
    recvs: list[Work] = field(default_factory=list)
    narrowest: int = 0


def flows(machine: SpatialMachine, works: list[Work], jitter: Random | None) -> dict[int, Flow]:
    """By the identity of a send's or a recv's work."""
    sent = {id(work): _flow(machine, work, jitter) for work in works if isinstance(work.step.of.action, Send)}
    arriving: dict[tuple[Core, Core], dict[int, list[Flow]]] = defaultdict(lambda: defaultdict(list))
    for flow in sent.values():
        for target, (cycle, _) in flow.arrivals.items():
            arriving[flow.send.step.core, target][cycle].append(flow)
    received: dict[int, Flow] = {}
    for work in works:
        if isinstance(action := work.step.of.action, Recv):
            flow = _match(work, arriving[action.source, work.step.core])
            flow.recvs.append(work)
            received[id(work)] = flow
    for flow in sent.values():
        _check(machine, flow)
    return sent | received


def _flow(machine: SpatialMachine, work: Work, jitter: Random | None) -> Flow:
    step, routes = work.step, work.step.of.routes
    assert isinstance(step.of.action, Send)
    targets = step.of.action.targets
    if len(routes) != len(targets) or len(set(targets)) != len(targets) or not targets:
        raise step.refuse("route", f"expected a route for each of {len(targets)} targets; got {len(routes)}")
    flow = Flow(work)
    edges: dict[tuple[Core, Core], tuple[int, int, int]] = {}  # -> begin of the hold, jitter so far, delay so far
    before: dict[Core, Core] = {}
    leaves: dict[str, None] = {}
    widths = []
    for route, target in zip(routes, targets, strict=True):
        if len(route) < 2 or route[0] != step.core or route[-1] != target or len(set(route)) != len(route):
            raise step.refuse("route", f"expected a way from {step.core} to {target}; got {_text(route)}")
        at, window, delay = step.of.start, 0, 0
        for a, b in zip(route, route[1:], strict=False):
            edge = machine.edge(a, b)
            if edge is None:
                raise step.refuse("route", f"expected links that exist; none leads from {a} to {b}")
            if before.setdefault(b, a) != a or b == step.core:
                raise step.refuse("route", f"expected routes that make a tree; two of them lead to {b}")
            if (a, b) not in edges:
                edges[a, b] = (at, window, delay)
            at, window, delay = edges[a, b]
            at, window = at + edge.latency, window + edge.jitter
            delay += jitter.randint(0, edge.jitter) if jitter else 0
            widths.append(edge.width)
        first, last = _edge(machine, *route[:2]), _edge(machine, *route[-2:])
        leaves[first.unit] = None
        flow.arrivals[target] = at + window, last.arrives
    if step.of.units != tuple(leaves):
        raise step.refuse("unit", f"expected {'+'.join(leaves)}, where its routes leave; got {'+'.join(step.of.units)}")
    took = step.of.duration
    for (a, b), (at, window, delay) in edges.items():
        begin, end = (at, at + took + window) if jitter is None else (at + delay, at + delay + took)
        flow.held.append(Held(a, b, begin, end))
    flow.narrowest = min(widths)
    return flow


def _edge(machine: SpatialMachine, a: Core, b: Core) -> Edge:
    edge = machine.edge(a, b)
    assert edge is not None
    return edge


def _text(route: Route) -> str:
    return ">".join(map(str, route))


def _match(work: Work, candidates: Mapping[int, list[Flow]]) -> Flow:
    """The flow that arrives now, of those that come from the same core, by their cycle; or who is nearest to it."""
    step = work.step
    if not candidates:
        raise step.refuse("arrival", "expected a send to this core; nobody sends")
    now = candidates.get(step.of.start) or candidates[min(candidates, key=lambda cycle: abs(cycle - step.of.start))]
    nearest = min(now, key=lambda flow: step.of.units != (flow.arrivals[step.core][1],))
    cycle, unit = nearest.arrivals[step.core]
    if cycle != step.of.start:
        why = f"expected to receive at cycle {cycle}, when it arrives; got {step.of.start}"
        raise step.refuse("arrival", why, nearest.send.step)
    if step.of.units != (unit,):
        why = f"expected {unit}, where it arrives; got {'+'.join(step.of.units)}"
        raise step.refuse("unit", why, nearest.send.step)
    if any(recv.step.core == step.core for recv in nearest.recvs):
        raise step.refuse("arrival", "expected one recv for what arrives; another takes it", nearest.send.step)
    return nearest


def _check(machine: SpatialMachine, flow: Flow) -> None:
    """Everyone on a flow takes as long; types and lengths agree; somebody is there."""
    send = flow.send
    alone = set(flow.arrivals) - {recv.step.core for recv in flow.recvs}
    for core in sorted(alone):
        cycle = flow.arrivals[core][0]
        raise Violation("arrival", core, cycle, "expected somebody who receives; nobody does", str(send.step))
    tile = send.reads[0]
    for recv in flow.recvs:
        target = recv.writes[0]
        if target.dtype != tile.dtype:
            raise recv.step.refuse("type", f"expected {tile.dtype}, which is sent; got {target.dtype}", send.step)
        if target.count != tile.count:
            raise recv.step.refuse("shape", f"expected {tile.count} elements; got {target.count}", send.step)
    steps: list[Step] = [send.step, *(recv.step for recv in flow.recvs)]
    traffic = max(work.traffic(machine.sram.width) for work in (send, *flow.recvs))
    took = max(1, -(-tile.bytes // flow.narrowest), traffic)
    for step in steps:
        if step.of.duration != took:
            others = [send.step] if step is not send.step else []
            raise step.refuse("duration", f"expected {took} cycles; got {step.of.duration}", *others)
