"""One program's exchanges in two orders: ours, and that of PyTorch's `schedule_overlap_bucketing`.

In: one rank's program in its final order, small exchanges joined. Out: for either order what stays exposed, and the
most memory it holds. Both passes get the same equations and prices, and one timeline judges both. PyTorch's sees a
graph in which every equation is a node; its order is read off the nodes.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx

from tessera.inspection.timeline import equation_seconds, timeline
from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.dist import axis_in, exchange_of
from tessera.ir.equation import Equation, Value, map_values
from tessera.ir.schema import is_view
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.machines import Machine
from tessera.passes.memory.overlap import is_product, overlap, paired
from tessera.passes.memory.schedule import live_bytes
from tessera.torch_internals import distributed as c10d
from tessera.torch_internals.operators import OpOverload
from tessera.torch_internals.overlap import ordered


@dataclass(frozen=True)
class Order:
    exposed: float  # seconds
    peak: int  # bytes that live at once

    @staticmethod
    def of(trace: Trace, machine: Machine) -> Order:
        told = timeline(trace, machine, fused=True)
        return Order(told.waiting, max(during for during, _ in live_bytes(trace)))


def compared(trace: Trace, machine: Machine) -> tuple[Order, Order | None, Order]:
    """Ours, theirs, and every exchange where it stands. None: where there are several groups, theirs may call itself
    without end, two waits each for the other."""
    try:
        theirs = Order.of(_Graph(trace, machine).ordered(), machine)
    except RecursionError:
        theirs = None
    return Order.of(overlap(trace), machine), theirs, Order.of(trace, machine)


class _Graph:
    """A trace as PyTorch's graph, and back in another order."""

    def __init__(self, trace: Trace, machine: Machine) -> None:
        self.trace, self.machine, self.builder = trace, machine, Builder.over(trace)
        self.graph, self.of = torch.fx.Graph(), dict[torch.fx.Node, Equation]()
        self.nodes: dict[Value, torch.fx.Node] = {}
        for v in (*trace.inputs, *trace.constants):
            node = self.nodes[v] = self.graph.placeholder(v.name)
            node.meta["val"] = self.example(v)
        for eqn in trace.equations:
            self.exchange(eqn) if exchange_of(eqn) is not None else self.equation(eqn)
        results = [*trace.results(), *trace.mutations.values()]
        self.graph.output([self.nodes[v] for v in dict.fromkeys(results) if v in self.nodes])

    def example(self, v: Value) -> object:
        return fake.fake_of(v.type, self.builder.mode) if isinstance(v.type, TensorType) else None

    def node(self, target: object, args: tuple, kwargs: dict, val: object) -> torch.fx.Node:
        node = self.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        node.meta["val"] = val
        return node

    def equation(self, eqn: Equation) -> None:
        args, kwargs = map_values((eqn.args, eqn.kwargs), self.nodes.__getitem__)  # type: ignore[misc, arg-type]
        vals = [None if v is None else self.example(v) for v in eqn.outputs]
        if isinstance(eqn.op, OpOverload) and is_view(eqn.op) and not eqn.many:  # shares its operand's memory
            given = map_values((eqn.args, eqn.kwargs), lambda v: self.nodes[v].meta["val"])
            with self.builder.mode:
                vals = [eqn.op(*given[0], **given[1])]  # type: ignore[index, misc]
        target = eqn.op if isinstance(eqn.op, OpOverload) else _other
        node = self.node(target, args, kwargs, vals if eqn.many else vals[0] if vals else None)
        self.of[node] = eqn
        for i, v in enumerate(eqn.outputs):
            if v is not None:
                self.nodes[v] = self.node(operator.getitem, (node, i), {}, vals[i]) if eqn.many else node

    def exchange(self, eqn: Equation) -> None:
        begin, wait = paired(self.builder, eqn)
        name, args = exchange_of(eqn)  # type: ignore[misc]
        ranks, group = eqn.op.mesh.size(axis_in(args)), axis_in(args)  # type: ignore[union-attr]
        x, *more = (self.nodes[v] for v in eqn.inputs())
        match name:
            case "all_gather":
                target, rest = c10d.all_gather_into_tensor, (ranks, group)
            case "reduce_scatter":
                target, rest = c10d.reduce_scatter_tensor, ("sum", ranks, group)
            case "all_reduce":
                target, rest = c10d.all_reduce, ("sum", group)
            case _:  # they know no permutation, and no rows of their own number
                target, rest = c10d.all_to_all_single, (more, more, group)
        start = self.node(target, (x, *rest), {}, self.example(begin.out))
        end = self.nodes[eqn.out] = self.node(c10d.wait_tensor, (start,), {}, self.example(eqn.out))
        self.of |= {start: begin, end: wait}

    def seconds(self, node: torch.fx.Node) -> float:
        eqn = self.of.get(node)
        return 0.0 if eqn is None else equation_seconds(eqn, self.machine, fused=True)

    def ordered(self) -> Trace:
        products = filter(is_product, self.trace.equations)
        heavy = {eqn.op.overloadpacket for eqn in products if isinstance(eqn.op, OpOverload)}
        gm = ordered(torch.fx.GraphModule({}, self.graph), self.seconds, heavy)
        equations = [self.of[node] for node in gm.graph.nodes if node in self.of]
        if len(equations) != len(self.of):
            raise AssertionError(f"expected {len(self.of)} equations in another order, got {len(equations)}")
        return self.trace.with_(equations=tuple(equations))


def _other(*args: object, **kwargs: object) -> object:
    """Stands for an operator that is not PyTorch's; nothing runs."""
    raise NotImplementedError
