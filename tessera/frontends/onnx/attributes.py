"""Attributes of nodes: numbers, texts, tensors and graphs, checked against the type that each says it has."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.external import Origin
from tessera.frontends.onnx.limits import Limits
from tessera.frontends.onnx.proto import onnx
from tessera.frontends.onnx.structure import Reference
from tessera.frontends.onnx.tensors import check_texts, read_sparse, read_tensor

_TYPES = onnx.AttributeProto
_FIELDS = {
    _TYPES.FLOAT: "f",
    _TYPES.INT: "i",
    _TYPES.STRING: "s",
    _TYPES.TENSOR: "t",
    _TYPES.GRAPH: "g",
    _TYPES.SPARSE_TENSOR: "sparse_tensor",
    _TYPES.TYPE_PROTO: "tp",
    _TYPES.FLOATS: "floats",
    _TYPES.INTS: "ints",
    _TYPES.STRINGS: "strings",
    _TYPES.TENSORS: "tensors",
    _TYPES.GRAPHS: "graphs",
    _TYPES.SPARSE_TENSORS: "sparse_tensors",
    _TYPES.TYPE_PROTOS: "type_protos",
}
_LISTS = {"floats", "ints", "strings", "tensors", "graphs", "sparse_tensors", "type_protos"}


class AttributeReader:
    def __init__(self, graph: Callable, origin: Origin, limits: Limits) -> None:
        self.graph, self.origin, self.limits = graph, origin, limits

    def read_all(self, node: onnx.NodeProto, where: str, visible: Container[str], depth: int) -> dict[str, object]:
        """`visible`: the names that a graph among them may read."""
        attributes: dict[str, object] = {}
        for a in node.attribute:
            check_name(a.name, f"{where}: an attribute")
            if a.name in attributes:
                raise OnnxError(f"{where}: attribute {a.name!r} is given twice")
            attributes[a.name] = self.read(a, where, visible, depth)
        return attributes

    def read(self, a: onnx.AttributeProto, where: str, visible: Container[str], depth: int) -> object:
        what = f"{where}: attribute {a.name!r}"
        if a.ref_attr_name:
            return Reference(a.ref_attr_name)
        field = _FIELDS.get(a.type) or self._guess(a, what)
        value: Any = getattr(a, field)
        if field not in _LISTS and field not in ("f", "i", "s") and not a.HasField(field):
            raise OnnxError(f"{what}: its {field} is missing")
        match field:
            case "f" | "i":
                return value
            case "s":
                return _text_or_bytes(value)
            case "floats" | "ints":
                return list(value)
            case "strings":
                return [_text_or_bytes(s) for s in value]
            case "t":
                return read_tensor(value, self.origin, self.limits, what)
            case "tensors":
                return [read_tensor(t, self.origin, self.limits, what) for t in value]
            case "sparse_tensor":
                return read_sparse(value, self.origin, self.limits, what)
            case "sparse_tensors":
                return [read_sparse(t, self.origin, self.limits, what) for t in value]
            case "g":
                return self.graph(value, visible, f"{what}: graph {value.name!r}", depth)
            case "graphs":
                return [self.graph(g, visible, f"{what}: graph {g.name!r}", depth) for g in value]
        return value  # type_protos

    def _guess(self, a: onnx.AttributeProto, what: str) -> str:
        """Files of the first IR version did not say which kind an attribute is."""
        filled = [f for f in _FIELDS.values() if (len(getattr(a, f)) if f in _LISTS else a.HasField(f))]
        if len(filled) != 1:
            raise OnnxError(f"{what}: expected one value of a known type, got type {a.type} and {len(filled)} values")
        return filled[0]


def _text_or_bytes(data: bytes) -> str:
    """Attributes may hold any bytes; those that are no text keep their bytes in surrogates."""
    return data.decode("utf-8", "surrogateescape")


def check_name(name: str, what: str) -> None:
    check_texts(what, name)
    if not name or "\0" in name or len(name) > 4096:
        raise OnnxError(f"{what}: expected a name, got {name[:40]!r}")
