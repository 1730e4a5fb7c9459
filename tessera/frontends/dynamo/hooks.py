"""Hooks on gradients, in a graph that Dynamo hands over.

A tensor's hook that Dynamo could follow is in the graph with its body: it becomes a function with a derivative of its
own, the identity, whose backward is the hook. Eager runs a hook on the whole gradient of its tensor, so everybody who
reads the tensor reads it behind that function, those before the hook was set too. What cannot be written down so is
refused; the graph then runs eagerly, and is right.
"""

from __future__ import annotations

import linecache
import re
from traceback import FrameSummary

import torch

from tessera.frontends.dynamo.data_writes import differentiable, keeps_history, written_arguments
from tessera.frontends.functional.function import record_function
from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Value, substitute
from tessera.ir.record import recording
from tessera.ir.trace import Trace
from tessera.ops.families import same_shape
from tessera.util.errors import CaptureError

_DEF = re.compile(r"\s*(async\s+)?def\s")
_ASKS = re.compile(r"register_(multi_grad_)?hook|retain_grad|autograd\.grad")


def record_hook(
    node: torch.fx.Node, builder: Builder, x: torch.Tensor, body: torch.fx.GraphModule, *free: object
) -> object:
    """The tensor behind its hook."""
    recorder = recording()
    assert recorder is not None
    if not differentiable(node.args[0]):
        raise CaptureError("a hook on a tensor that has no gradient; the graph runs eagerly, and refuses it")
    if not all(isinstance(v, torch.Tensor) for v in free):
        raise CaptureError("a hook that reads numbers of the program; the graph runs eagerly")
    ref = recorder.ref(recorder.fake(x))
    before = recorder.value(x)
    if ref.view is not None or ref.given or any(before is after for _, after in builder.hooked):
        raise CaptureError("a hook on an argument or a view, or a second one on a tensor; the graph runs eagerly")

    class Hooked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *free):  # noqa: ANN001, ANN002, ANN205
            ctx.free = free
            return x.clone()

        @staticmethod
        def backward(ctx, ct):  # noqa: ANN001, ANN205
            changed = body(ct, *ctx.free)
            changed = changed[0] if isinstance(changed, tuple) else changed
            if changed is not None and (changed.dtype != ct.dtype or not same_shape(changed.shape, ct.shape)):
                raise CaptureError("a hook that changes a gradient's type or size; the graph runs eagerly")
            return ct if changed is None else changed, *(None for _ in ctx.free)

    with torch.enable_grad():  # a hook set under no_grad is set all the same
        out = record_function(Hooked, (x, *free), recorder)
    ref.value = recorder.value(out)  # type: ignore[arg-type]  # the same memory: other names of it, and views, see writes
    builder.hooked.append((before, ref.value))
    return x


def behind_hooks(trace: Trace, hooked: list[tuple[Value, Value]], results: int) -> Trace:
    """The program in which every reader of a tensor reads it behind its hook. Its first outputs are results: outside,
    `retain_grad` and hooks of a result get what its own hook made of the gradient, and a hook in the program comes
    after them."""
    for before, after in hooked:
        hook = next(e for e in trace.equations if after in e.results())
        makers = [i for i, e in enumerate(trace.equations) if any(v in hook.inputs() for v in e.results())]
        first, rest = trace.equations[: makers[-1] + 1], trace.equations[makers[-1] + 1 :]
        if any(before in e.inputs() for e in first):
            raise CaptureError("a hook that reads what is made of its tensor; the graph runs eagerly")
        trace = trace.with_(
            equations=(*first, hook, *(_behind(e, before, after) for e in rest if e is not hook)),
            outputs=substitute(trace.outputs, {before: after}),
            mutations={target: after if v is before else v for target, v in trace.mutations.items()},
        )
    if any(after in trace.outputs[:results] for _, after in hooked):
        raise CaptureError(
            "a hook on a tensor that the program gives back: whoever asks for its gradient outside is to get what the "
            "hook made of it; the graph runs eagerly. Set the hook on what the program gives"
        )
    return trace


def _behind(eqn: Equation, before: Value, after: Value) -> Equation:
    return eqn.substitute({before: after}) if before in eqn.inputs() else eqn


def check_between_results(gm: torch.fx.GraphModule) -> None:
    """Refuse a graph that ends in a function that asks for the gradient of one of its results by another, or by an
    argument that it wrote, or sets a hook on one of several, there or later. Links serve whoever asks outside
    (`runtime/linked.py`); not all views and written arguments have some, and here it is known that somebody asks."""
    ended = getattr(gm, "compile_subgraph_reason", None)
    if ended is None or not getattr(ended, "graph_break", False):
        return
    functions = list(map(_function_around, ended.user_stack))
    told = (str(ended.reason), *functions)
    unknown = not all(functions)  # there is no source
    asks = unknown or any(map(_ASKS.search, told))
    sets_hook = unknown or any("hook" in text for text in told)
    results = _results(gm)
    depends = _depend(gm, results) or any(map(keeps_history, gm.graph.nodes))
    if asks and (depends or (sets_hook and len(results) > 1) or written_arguments(gm)):
        raise CaptureError("the program asks for gradients between results of this graph; it runs eagerly")


def _function_around(frame: FrameSummary) -> str:
    """The text of the function in which a line stands, or of its whole file."""
    lines = linecache.getlines(frame.filename)
    if not frame.line or frame.lineno is None or frame.lineno > len(lines):
        return ""
    place = frame.lineno - 1
    begins = [i for i in range(place, -1, -1) if _DEF.match(lines[i]) and _indent(lines[i]) < _indent(lines[place])]
    first = begins[0] if begins else 0
    ends = (
        i
        for i in range(place + 1, len(lines))
        if begins and lines[i].strip() and _indent(lines[i]) <= _indent(lines[first])
    )
    return "".join(lines[first : next(ends, len(lines))])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _results(gm: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """What it computes that has a gradient."""
    output = next(n for n in gm.graph.nodes if n.op == "output")
    return {n for n in output.all_input_nodes if n.op != "placeholder" and differentiable(n)}


def _depend(gm: torch.fx.GraphModule, results: set[torch.fx.Node]) -> bool:
    """Is one made of another?"""
    behind: set[torch.fx.Node] = set()  # made of a result
    for node in gm.graph.nodes:
        if any(n in behind or n in results for n in node.all_input_nodes):
            behind.add(node)
    return bool(results & behind)
