"""Control flow in ONNX: `cond` is If, `while_loop` is Loop, `scan` is Scan.

In: an equation whose arguments hold sub-traces. Out: a node whose graphs compute them. Graphs inside a node see the
values around it, so that only what changes from turn to turn is an input of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tessera.exporters.onnx.graph import Graph, Ref, needed
from tessera.exporters.onnx.program import cleaned
from tessera.ir.equation import Equation
from tessera.ir.trace import Trace

if TYPE_CHECKING:
    from tessera.exporters.onnx.lower import Lowering

Writer = Callable[["Lowering"], list[Ref]]


def cond(lowering: Lowering, eqn: Equation) -> list[Ref]:
    test, true, false, *_ = eqn.args
    given = _operands(lowering, eqn, 3)
    branches = {
        "then_branch": _inside(lowering, [], lambda inner: inner.within(_body(true), given)),
        "else_branch": _inside(lowering, [], lambda inner: inner.within(_body(false), given)),
    }
    return _node(lowering.g, "If", [_truth(lowering.g, lowering.refs(test))], branches)


def while_loop(lowering: Lowering, eqn: Equation) -> list[Ref]:
    """The test is asked once before the loop, and at the end of each turn."""
    test, body, carried = _body(eqn.args[0]), _body(eqn.args[1]), eqn.args[2]
    assert isinstance(carried, int)
    g, given = lowering.g, _operands(lowering, eqn, 3)
    carry, rest = given[:carried], given[carried:]
    (first,) = lowering.within(test, given)
    turn, going = Ref(g.fresh("turn"), torch.int64, ()), Ref(g.fresh("going"), torch.bool, ())
    now = _inputs(g, body, carried)

    def write(inner: Lowering) -> list[Ref]:
        after = inner.within(body, [*now, *rest])
        (again,) = inner.within(test, [*after, *rest])
        return [_truth(inner.g, again), *after]

    loop = _inside(lowering, [turn, going, *now], write)
    return _node(g, "Loop", [None, _truth(g, first), *carry], {"body": loop}, skip=1)


def scan(lowering: Lowering, eqn: Equation) -> list[Ref]:
    body, carried, sliced, reverse = _body(eqn.args[0]), *eqn.args[1:4]
    assert isinstance(carried, int) and isinstance(sliced, int)
    given = _operands(lowering, eqn, 4)
    now = _inputs(lowering.g, body, carried + sliced)
    step = _inside(lowering, now, lambda inner: inner.within(body, [*now, *given[len(now) :]]))
    stacked = len(step.outputs) - carried
    return _node(
        lowering.g, "Scan", given[: len(now)], {"body": step}, num_scan_inputs=sliced,
        scan_input_directions=[1] * sliced if reverse else None,
        scan_output_directions=[1] * stacked if reverse and stacked else None,
    )  # fmt: skip


def _body(sub: object) -> Trace:
    assert isinstance(sub, Trace)
    return cleaned(sub)


def _operands(lowering: Lowering, eqn: Equation, first: int) -> list[Ref]:
    return [lowering.refs(o) for o in eqn.args[first:]]  # type: ignore[misc]  # they are tensors


def _inputs(g: Graph, body: Trace, count: int) -> list[Ref]:
    """What a graph is given anew at each turn."""
    return [Ref(g.fresh(v.name), v.dtype, v.shape) for v in body.inputs[:count]]


def _inside(lowering: Lowering, inputs: Sequence[Ref], write: Writer) -> Graph:
    """A graph of its own, which sees what is around it. What it gives is made inside, and given once."""
    inner = lowering.inside()
    g = inner.g
    g.inputs = list(inputs)
    results = write(inner)
    inside = {o for n in g.nodes for o in n.outputs}
    for x in results:
        g.outputs.append(x if x.name in inside else g.op("Identity", x, shape=x.shape))
        inside.discard(x.name)
    g.nodes = needed(g.nodes, {o.name for o in g.outputs})
    return g


def _truth(g: Graph, x: object) -> Ref:
    """One truth value, without dimensions."""
    test = g.scalar(x, torch.bool)
    return test if test.shape == () else g.op("Reshape", test, g.ints([]), shape=())


def _node(
    g: Graph, kind: str, inputs: Sequence[Ref | None], inner: dict[str, Graph], skip: int = 0, **attributes: Any
) -> list[Ref]:
    """The node. The first `skip` outputs of its graphs are no results of it."""
    outputs = next(iter(inner.values())).outputs[skip:]
    results = g.op(kind, *inputs, outputs=len(outputs), dtype=[o.dtype for o in outputs], **attributes)
    g.nodes[-1].inner = inner
    return results
