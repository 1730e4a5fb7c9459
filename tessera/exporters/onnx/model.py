"""The ModelProto.

In: a `Program` and the opset. Out: an `onnx.ModelProto` without the weights' contents, and those contents by name, for
`file.py` to put inside or beside it.
"""

from __future__ import annotations

from typing import Any

import torch

from tessera.exporters.onnx.functions import DOMAIN, Function, outline
from tessera.exporters.onnx.graph import Content, Graph, Node, Ref, every, needed, real_parts
from tessera.exporters.onnx.lower import Lowering, count_readers, read_values
from tessera.exporters.onnx.program import Program, updated
from tessera.frontends.onnx.elements import BITS, CODES, Narrow, code_of
from tessera.frontends.onnx.proto import onnx
from tessera.ir.equation import Value
from tessera.ir.types import ScalarType, Size, TensorType
from tessera.util.safetensors import flat_bytes
from tessera.util.version import VERSION

SCALARS = {int: torch.int64, float: torch.float64, bool: torch.bool}


def to_model(program: Program, opset: int) -> tuple[onnx.ModelProto, dict[str, Content]]:
    """The model, and its weights by name."""
    g = Graph(opset)
    outputs = _written(g, program)
    given = {name for name, _ in outputs}
    nodes, functions = outline(needed(g.nodes, given), given, g.small_constants())
    read = {i for n in every(nodes) for i in n.inputs} | given
    weights = {name: data for name, data in g.initializers.items() if name in read}
    graph = onnx.helper.make_graph(
        [_node(n, program) for n in nodes],
        program.trace.name,
        [_info(ref.name, ref.dtype, ref.sizes, program) for ref in g.inputs],
        [_info(name, ref.dtype, ref.sizes, program) for name, ref in outputs],
    )
    imports = [onnx.helper.make_opsetid("", opset)]
    if functions:
        imports.append(onnx.helper.make_opsetid(DOMAIN, 1))
    model = onnx.helper.make_model(
        graph, opset_imports=imports, functions=[_function(f, imports[:1], program) for f in functions],
        producer_name="tessera", producer_version=VERSION,
    )  # fmt: skip
    model.ir_version = min(model.ir_version, onnx.helper.find_min_ir_version_for(list(imports[:1])))
    if functions:
        model.ir_version = max(model.ir_version, 8)
    return model, weights


def _written(g: Graph, program: Program) -> list[tuple[str, Ref]]:
    """Write all nodes; gives the outputs, each under its own name."""
    trace = program.trace
    lowering = Lowering(g, trace, program.mode)
    names = {v: name for v, (name, _) in program.weights.items()}
    shared: dict[tuple, Ref] = {}
    for v, name in program.inputs.items():
        dtype = v.dtype if isinstance(v.type, TensorType) else SCALARS[v.type.kind]  # type: ignore[union-attr]
        shape = v.shape if isinstance(v.type, TensorType) else ()
        lowering.env[v] = Ref(g.fresh(name), dtype, shape)
        g.inputs.append(real_parts(lowering.env[v]))
    read = read_values(trace)
    for v, (name, data) in program.weights.items():
        if v not in read:
            continue
        key = (data.data_ptr(), data.dtype, tuple(data.shape), data.stride()) if data.numel() else (name,)
        if key not in shared:  # tied weights are one
            shared[key] = lowering.weight(v, name, data)
        lowering.env[v] = shared[key]
    lowering.readers = count_readers(trace, {v: lowering.env[v].name for v in names if v in lowering.env})
    results = lowering.run()
    listed: list[tuple[str, object, Value | object]] = []
    for (name, value), result in zip(program.outputs, results, strict=True):
        listed.append((name, result, value))
    for target, new in trace.mutations.items():
        held = names.get(target) or program.inputs[target]
        listed.append((updated(held), lowering.env[new], new))
    g.source = type(g.source)()
    return _named(g, [(name, _output(g, result, value)) for name, result, value in listed])


def _output(g: Graph, result: object, value: object) -> Ref:
    if isinstance(result, Ref):
        if isinstance(value, Value) and isinstance(value.type, ScalarType):
            return Ref(result.name, result.dtype, ())
        return real_parts(result)
    assert isinstance(result, (bool, int, float)), f"an output is {result!r}, which is no tensor"
    return g.full(result, SCALARS[type(result)])


def _named(g: Graph, outputs: list[tuple[str, Ref]]) -> list[tuple[str, Ref]]:
    """Outputs under their own names: what a node makes is renamed; what is given twice, or came in, is copied."""
    produced = {o for n in g.nodes for o in n.outputs}
    renamed: dict[str, str] = {}
    taken: list[tuple[str, Ref]] = []
    copies: list[tuple[str, Ref]] = []
    for name, ref in outputs:
        own = g.fresh(name)
        if ref.name in produced and ref.name not in renamed:
            renamed[ref.name] = own
        else:
            copies.append((own, ref))
        taken.append((own, Ref(own, ref.dtype, ref.shape)))
    for node in every(g.nodes):
        node.inputs = [renamed.get(i, i) for i in node.inputs]
        node.outputs = [renamed.get(o, o) for o in node.outputs]
    for own, ref in copies:
        g.nodes.append(Node("Identity", [renamed.get(ref.name, ref.name)], [own], {}))
    return taken


# --- messages ---


def _node(node: Node, program: Program) -> onnx.NodeProto:
    attributes: dict[str, Any] = {k: _attribute(v) for k, v in node.attributes.items()}
    attributes |= {k: _graph(inner, program, f"{node.kind}_{k}") for k, inner in node.inner.items()}
    # What a node gives begins with the path of its module; a call of a function is the module's.
    name = "/" + (node.source.module if node.domain else node.outputs[0]).replace(".", "/")
    message = onnx.helper.make_node(node.kind, node.inputs, node.outputs, name=name, domain=node.domain, **attributes)
    if text := str(node.source):
        message.doc_string = text
    return message


def _attribute(value: object) -> object:
    if isinstance(value, torch.dtype):
        return CODES[value]
    return to_tensor("", value) if isinstance(value, torch.Tensor) else value


def _graph(g: Graph, program: Program, name: str) -> onnx.GraphProto:
    return onnx.helper.make_graph(
        [_node(n, program) for n in g.nodes],
        name,
        [_info(r.name, r.dtype, r.sizes, program) for r in g.inputs],
        [_info(r.name, r.dtype, r.sizes, program) for r in g.outputs],
    )


def _function(f: Function, imports: list, program: Program) -> onnx.FunctionProto:
    constants = [
        onnx.helper.make_node("Constant", [], [name], value=to_tensor("", data)) for name, data in f.constants.items()
    ]
    nodes = [*constants, *(_node(n, program) for n in f.nodes)]
    return onnx.helper.make_function(DOMAIN, f.name, f.inputs, f.outputs, nodes, imports)


def _info(name: str, dtype: torch.dtype, shape: tuple[Size, ...], program: Program) -> onnx.ValueInfoProto:
    sizes = [n if isinstance(n, int) else program.size_name(n) for n in shape]
    return onnx.helper.make_tensor_value_info(name, CODES[dtype], sizes)


def to_tensor(name: str, data: Content) -> onnx.TensorProto:
    message = onnx.TensorProto(name=name, data_type=code_of(data), dims=tuple(data.shape))
    message.raw_data = raw(data)
    return message


def raw(data: Content) -> bytes:
    """The elements as a file holds them, row by row; of four bits two in a byte, the first one low."""
    if isinstance(data, Narrow):
        assert BITS[data.code] == 4, f"no form for elements of {BITS[data.code]} bits"
        flat = torch.nn.functional.pad(data.data.cpu().reshape(-1), (0, data.data.numel() % 2)).view(torch.uint8)
        return ((flat[0::2] & 15) | (flat[1::2] << 4)).numpy().tobytes()
    return flat_bytes(data).numpy().tobytes()


def byte_count(data: Content) -> int:
    if isinstance(data, Narrow):
        return -(-data.data.numel() * BITS[data.code] // 8)
    return data.numel() * data.element_size()
