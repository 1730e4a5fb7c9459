"""Reading an ONNX file.

In: a path, bytes or a message. Out: a `Model` in which every name is defined before it is read, once, and every
function that is called exists and does not call itself. What is wrong is an `OnnxError` that names the file and the
node.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from tessera.frontends.onnx.attributes import AttributeReader, check_name
from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.external import Origin
from tessera.frontends.onnx.limits import LIMITS, Limits
from tessera.frontends.onnx.proto import DecodeError, onnx
from tessera.frontends.onnx.structure import Function, Graph, Key, Model, Node, ValueInfo, reads, subgraphs
from tessera.frontends.onnx.tensors import check_texts, read_sparse, read_tensor

NEWEST = onnx.defs.onnx_opset_version()
LEAST_NODES = 64  # a file with fewer is taken for one of so many
Source = str | os.PathLike | bytes | bytearray | memoryview | onnx.ModelProto


def read_model(source: Source, limits: Limits = LIMITS, folder: str | None = None) -> Model:
    """`folder` is where external data of bytes or of a message lies; a file's lies beside it."""
    if isinstance(source, onnx.ModelProto):
        return ModelReader(source, "", folder, limits).model()
    if isinstance(source, (bytes, bytearray, memoryview)):
        return ModelReader(_parsed(bytes(source), "bytes", limits), "", folder, limits).model()
    path = os.fspath(source)
    data = _contents(path, limits)
    return ModelReader(
        _parsed(data, path, limits), path, folder or os.path.dirname(os.path.abspath(path)), limits
    ).model()


def _contents(path: str, limits: Limits) -> bytes:
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            raise OnnxError(f"{path}: expected a file")
        if about.st_size > limits.file_bytes:
            raise OnnxError(f"{path}: {about.st_size} bytes; the limit is {limits.file_bytes}")
        return Path(path).read_bytes()
    except OSError as error:
        raise OnnxError(f"{path}: cannot be read: {error.strerror}") from error


def _parsed(data: bytes, where: str, limits: Limits) -> onnx.ModelProto:
    if len(data) > limits.file_bytes:
        raise OnnxError(f"{where}: {len(data)} bytes; the limit is {limits.file_bytes}")
    message = onnx.ModelProto()
    try:
        message.ParseFromString(data)
    except (DecodeError, RuntimeError, ValueError) as error:
        raise OnnxError(f"{where}: expected an ONNX model, the bytes do not parse: {error}") from error
    return message


class ModelReader:
    def __init__(self, message: onnx.ModelProto, path: str, folder: str | None, limits: Limits) -> None:
        self.message, self.path, self.limits = message, path, limits
        self.origin = Origin(folder, limits)
        self.file = path or "the model"
        self.nodes = 0
        self.attributes = AttributeReader(self.graph, self.origin, limits)

    def model(self) -> Model:
        m = self.message
        if not m.HasField("graph"):
            raise OnnxError(f"{self.file}: expected a model with a graph, got none")
        if m.ir_version < 1:
            raise OnnxError(f"{self.file}: expected an IR version of at least 1, got {m.ir_version}")
        opsets = self.opsets(m.opset_import, self.file)
        if not opsets and m.ir_version < 3:
            opsets = {"": 1}
        functions = self.functions(opsets)
        self._check_calls(functions, opsets)
        graph = self.graph(m.graph, frozenset(), f"{self.file}: graph {m.graph.name!r}", 0)
        nodes = list(_every_node(graph.nodes))
        for node in nodes:
            self._check_domain(node, opsets, functions, self.file)
        self._check_expansion(nodes, functions)
        training = tuple(self._training(info, graph) for info in m.training_info)
        metadata = {p.key: p.value for p in m.metadata_props}
        check_texts(f"{self.file}: metadata", *metadata, *metadata.values())
        check_texts(f"{self.file}: its producer", m.producer_name, m.producer_version)
        producer = f"{m.producer_name} {m.producer_version}".strip()
        return Model(graph, functions, opsets, self.path, producer, m.ir_version, metadata, training)

    def opsets(self, listed: Iterable[onnx.OperatorSetIdProto], where: str) -> dict[str, int]:
        opsets: dict[str, int] = {}
        for entry in listed:
            check_texts(f"{where}: the domain of an opset", entry.domain)
            domain = _domain(entry.domain)
            if opsets.setdefault(domain, entry.version) != entry.version:
                raise OnnxError(
                    f"{where}: domain {domain!r} is imported twice, as {opsets[domain]} and {entry.version}"
                )
            if entry.version < 1 or (not domain and entry.version > NEWEST):
                raise OnnxError(f"{where}: opset {entry.version} of {domain or 'ai.onnx'}; known are 1 to {NEWEST}")
        return opsets

    # --- functions ---

    def functions(self, opsets: Mapping[str, int]) -> dict[Key, Function]:
        functions: dict[Key, Function] = {}
        for f in self.message.functions:
            key = (_domain(f.domain), f.name, f.overload)
            where = f"{self.file}: function {f.domain}.{f.name}"
            check_texts(where, *key)
            if not f.name or key in functions:
                raise OnnxError(f"{where}: {'defined twice' if f.name else 'a function needs a name'}")
            functions[key] = self.function(f, key, where, opsets)
        return functions

    def function(self, f: onnx.FunctionProto, key: Key, where: str, opsets: Mapping[str, int]) -> Function:
        _unique([*f.input], where, "input")
        _unique([*f.attribute, *(a.name for a in f.attribute_proto)], where, "attribute")
        nodes = self.body(f.node, set(f.input), where, 1)
        defined = set(f.input).union(*(n.outputs for n in nodes))
        for name in f.output:
            if name not in defined:
                raise OnnxError(f"{where}: its output {name!r} is not defined")
        own = self.opsets(f.opset_import, where) or dict(opsets)
        defaults = {a.name: self.attributes.read(a, where, frozenset(), 1) for a in f.attribute_proto}
        return Function(
            key[0], f.name, tuple(f.input), tuple(f.output), tuple(f.attribute), defaults, nodes, own, f.overload
        )

    def _check_calls(self, functions: Mapping[Key, Function], opsets: Mapping[str, int]) -> None:
        """No function calls itself, by any way, and chains of calls are short."""
        depth: dict[Key, int] = {}

        def visit(key: Key, above: tuple[Key, ...]) -> int:
            if key in above:
                raise OnnxError(f"{self.file}: function {key[0]}.{key[1]} calls itself")
            if len(above) > self.limits.calls:
                raise OnnxError(f"{self.file}: functions call each other more than {self.limits.calls} deep")
            if key not in depth:
                function = functions[key]
                nodes = list(_every_node(function.nodes))
                for node in nodes:
                    self._check_domain(node, function.opsets, functions, f"{self.file}: function {key[0]}.{key[1]}")
                called = {n.key for n in nodes} & functions.keys()
                depth[key] = 1 + max((visit(k, (*above, key)) for k in called), default=0)
            if len(above) + depth[key] > self.limits.calls:
                raise OnnxError(f"{self.file}: functions call each other more than {self.limits.calls} deep")
            return depth[key]

        for key in functions:
            visit(key, ())

    def _check_expansion(self, nodes: list[Node], functions: Mapping[Key, Function]) -> None:
        """A few functions that call each other twice, and so on, are no more than their bytes justify."""
        sizes: dict[Key, int] = {}

        def size(listed: Iterable[Node]) -> int:
            return sum(1 + (called(n.key) if n.key in functions else 0) for n in listed)

        def called(key: Key) -> int:
            if key not in sizes:
                sizes[key] = size(_every_node(functions[key].nodes))
            return sizes[key]

        most = max(self.nodes, LEAST_NODES) * self.limits.expanded
        if (count := size(nodes)) > most:
            raise OnnxError(f"{self.file}: {count} nodes where functions are called; at most {most} for {self.nodes}")

    def _check_domain(self, node: Node, opsets: Mapping[str, int], functions: Mapping, where: str) -> None:
        if node.domain not in opsets and node.key not in functions:
            raise OnnxError(f"{where}: {node}: no opset is imported for domain {node.domain or 'ai.onnx'!r}")

    def _training(self, info: onnx.TrainingInfoProto, graph: Graph) -> Graph:
        where = f"{self.file}: training_info"
        outer = frozenset((*graph.initializers, *(v.name for v in graph.inputs)))
        return self.graph(info.algorithm, outer.union(*(n.outputs for n in graph.nodes)), where, 0)

    # --- graphs ---

    def graph(self, g: onnx.GraphProto, outer: Container[str], where: str, depth: int) -> Graph:
        """`outer`: the names that graphs around it define before it."""
        if depth > self.limits.nesting:
            raise OnnxError(f"{where}: graphs are nested more than {self.limits.nesting} deep")
        check_texts(f"{where}: its name", g.name)
        inputs = tuple(self.value_info(v, where) for v in g.input)
        _unique([v.name for v in inputs], where, "input")
        initializers = self._initializers(g, where)
        names = {v.name for v in inputs} | initializers.keys()
        # A graph input that names a value around it hides that; anything else may not be defined twice.
        nodes = self.body(g.node, names, where, depth, outer)
        defined = names.union(*(n.outputs for n in nodes))
        outputs = tuple(self.value_info(v, where) for v in g.output)
        for v in outputs:
            if v.name not in defined and v.name not in outer:
                raise OnnxError(f"{where}: its output {v.name!r} is not defined")
        needed = set().union(*(reads(n) for n in nodes)) | {v.name for v in outputs}
        return Graph(g.name, inputs, outputs, initializers, nodes, frozenset(needed - defined))

    def _initializers(self, g: onnx.GraphProto, where: str) -> dict[str, object]:
        initializers: dict[str, object] = {}
        for tensor in g.initializer:
            self._name_initializer(initializers, tensor.name, where)
            initializers[tensor.name] = read_tensor(tensor, self.origin, self.limits, where)
        for sparse in g.sparse_initializer:
            self._name_initializer(initializers, sparse.values.name, where)
            initializers[sparse.values.name] = read_sparse(sparse, self.origin, self.limits, where)
        return initializers

    def _name_initializer(self, known: Mapping[str, object], name: str, where: str) -> None:
        check_name(name, f"{where}: an initializer")
        if name in known:
            raise OnnxError(f"{where}: initializer {name!r} is defined twice")

    def body(
        self, listed: Iterable[onnx.NodeProto], names: set[str], where: str, depth: int, outer: Container[str] = ()
    ) -> tuple[Node, ...]:
        """The nodes of a graph or function; each may read what stands before it and what is around."""
        listed = list(listed)
        defined, nodes = set(names), []
        outputs = {name for n in listed for name in n.output}
        for index, n in enumerate(listed):
            self.nodes += 1
            if self.nodes > self.limits.nodes:
                raise OnnxError(f"{where}: more than {self.limits.nodes} nodes")
            what = f"{where}: node {index} ({n.op_type}{f', {n.name!r}' if n.name else ''})"
            check_texts(what, n.op_type, n.domain, n.name, n.overload)
            if not n.op_type:
                raise OnnxError(f"{what}: a node needs an operator")
            for name in filter(None, n.input):
                if name not in defined and name not in outer:
                    why = "later: nodes must be in order, without circles" if name in outputs else "nowhere"
                    raise OnnxError(f"{what}: its input {name!r} is defined {why}")
            attributes = self.attributes.read_all(n, what, _Either(outer, defined), depth + 1)
            for name in filter(None, n.output):
                check_name(name, f"{what}: an output")
                if name in defined:
                    raise OnnxError(f"{what}: its output {name!r} is defined twice")
                defined.add(name)
            domain = _domain(n.domain)
            nodes.append(
                Node(n.op_type, domain, tuple(n.input), tuple(n.output), attributes, n.name, index, n.overload)
            )
        return tuple(nodes)

    def value_info(self, v: onnx.ValueInfoProto, where: str) -> ValueInfo:
        check_name(v.name, f"{where}: an input or output")
        kind = v.type.WhichOneof("value") or "tensor_type"
        about, depth = v.type, 0
        while (inner := about.WhichOneof("value")) in ("sequence_type", "optional_type"):
            about, depth = getattr(about, inner).elem_type, depth + 1
            if depth > self.limits.nesting:
                raise OnnxError(f"{where}: the type of {v.name!r} is nested too deep")
        element, shape = 0, None
        if inner in ("tensor_type", "sparse_tensor_type"):
            tensor = getattr(about, inner)
            element = tensor.elem_type
            shape = (
                tuple(_size(dim, f"{where}: a size of {v.name!r}") for dim in tensor.shape.dim)
                if tensor.HasField("shape")
                else None
            )
        return ValueInfo(v.name, kind.removesuffix("_type").removesuffix("_tensor"), element, shape)


class _Either:
    """Names that one or the other has: those around a graph, and those that stand before a node in it. No copies: a
    file with a graph in every node would make one of all names for each."""

    def __init__(self, outer: Container[str], own: Container[str]) -> None:
        self.outer, self.own = outer, own

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self.own or name in self.outer)


def _size(dim: onnx.TensorShapeProto.Dimension, what: str) -> int | str | None:
    kind = dim.WhichOneof("value")
    if kind == "dim_value":
        return int(dim.dim_value) if dim.dim_value >= 0 else None
    check_texts(what, dim.dim_param)
    return dim.dim_param or None if kind else None


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _unique(names: list[str], where: str, what: str) -> None:
    seen: set[str] = set()
    for name in names:
        check_name(name, f"{where}: an {what}")
        if name in seen:
            raise OnnxError(f"{where}: {what} {name!r} is defined twice")
        seen.add(name)


def _every_node(nodes: Iterable[Node]) -> Iterable[Node]:
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _every_node(graph.nodes)
