"""An imported module as one program, whatever its signature: for what leaves again.

In: an `OnnxModule` and example inputs. Out: the recording of its whole graph, with a symbol for every size that the
file names or leaves open, the range that it holds for, and whose inputs are which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tessera.frontends.arguments import Range
from tessera.frontends.onnx.capture import Recorded, Result, record_part
from tessera.frontends.onnx.importer import Importer, Stop
from tessera.frontends.onnx.segments import Plan
from tessera.ir.equation import Value
from tessera.ir.trace import Trace
from tessera.onnx.module import OnnxModule, arguments
from tessera.onnx.ranges import asked_sizes, named_sizes, program_ranges
from tessera.torch_internals.shapes import any_size
from tessera.util.errors import CaptureError


@dataclass(frozen=True)
class WholeGraph:
    recorded: Recorded
    weights: dict[Value, tuple[str, torch.Tensor]]
    inputs: dict[Value, str]
    values: dict[str, torch.Tensor]  # the example inputs
    outputs: list[tuple[str, Value]]
    sizes: dict[str, str]  # symbol -> the file's name for it, or the caller's
    ranges: dict[str, Range]  # of symbols: for which sizes the program holds, and was asked to
    held: frozenset[Value]  # weights that are the module's; others are constants of the program

    @property
    def trace(self) -> Trace:
        return self.recorded.captured.trace


def whole_graph(
    net: OnnxModule, args: tuple, kwargs: Mapping[str, object], dynamic: object = None, fixed: bool = False
) -> WholeGraph:
    """`dynamic`, as of `tessera.export`, gives names and ranges to sizes that the file leaves open; where all are
    `fixed`, the program is of the inputs' own sizes."""
    graph = net.__tessera_onnx__
    given = arguments(graph, args, kwargs)
    asked = asked_sizes(dynamic, graph.infos, graph.inputs)
    (part,) = Plan(graph.model.graph).parts or (None,)
    if part is None:
        raise CaptureError("the file has no nodes")
    state = graph.state
    inputs = {n: given[n] if n in given else state[n] for n in part.inputs}
    constants = {n: x for n, x in inputs.items() if n not in given and state.known(n)}
    plain = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in constants.items()}
    importer = Importer(graph.model, graph.limits.given(graph.bytes(given)), graph.device(given))
    dims = None if fixed else graph.compiler.dynamic(part, inputs, set(constants))
    env, mode = any_size()
    try:
        with torch.no_grad(), mode:
            recorded = record_part(graph.model, part, inputs, plain, importer, dims or None, graph.backend.name, env)
    except Stop as stop:
        raise CaptureError(f"the graph is not one program: {stop}") from stop
    owners = [n for n, x in inputs.items() if n not in constants]
    trace = recorded.captured.trace
    count = len(recorded.places)
    by_value = dict(zip(trace.inputs[:count], (owners[i] for i in recorded.places), strict=True))
    weights: dict[Value, tuple[str, torch.Tensor]] = {
        v: (n, state[n].detach())  # type: ignore[attr-defined]
        for v, n in by_value.items()
        if n not in given
    }
    held = frozenset(weights)
    lifted = zip(trace.inputs[count:], recorded.lifted, strict=True)
    weights |= {v: (v.name, x) for v, x in lifted}
    called = {v: n for v, n in by_value.items() if n in given}
    outputs: list[tuple[str, Value]] = []
    for name, leaf in zip(part.outputs, recorded.leaves, strict=True):
        if not isinstance(leaf, Result):
            raise CaptureError(f"the output {name!r} is a constant of the file, which a program does not give")
        outputs.append((name, trace.outputs[leaf.place]))  # type: ignore[arg-type]
    order = {v.name: i for i, v in enumerate(graph.model.graph.outputs)}
    outputs.sort(key=lambda pair: order.get(pair[0], 0))
    values = {n: given[n] for n in called.values()}
    sizes, ranges = named_sizes(asked, graph.infos, called, program_ranges(env))
    return WholeGraph(recorded, weights, called, values, outputs, sizes, ranges, held)  # type: ignore[arg-type]
