"""Operators as functions over others, where ONNX defines them so.

In: a node and its inputs. Out: the function that its schema gives for this opset, read like a function of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tessera.frontends.onnx.elements import Narrow, code_of
from tessera.frontends.onnx.file import ModelReader
from tessera.frontends.onnx.limits import LIMITS
from tessera.frontends.onnx.proto import onnx
from tessera.frontends.onnx.structure import Function, Node

_cache: dict[tuple, Function | None] = {}


def _read(message: onnx.FunctionProto, node: Node, version: int) -> Function:
    reader = ModelReader(onnx.ModelProto(), "", None, LIMITS)
    where = f"ONNX's own function {message.name}"
    return reader.function(message, node.key, where, {node.domain: version, "": version})


def function_of(node: Node, version: int, args: Sequence[object], attributes: Mapping[str, object]) -> Function | None:
    """The body of an operator, or None where ONNX gives it none."""
    try:
        schema = onnx.defs.get_schema(node.op, version, node.domain)
    except onnx.defs.SchemaError:
        return None
    if schema.deprecated:
        return None
    if schema.has_function:
        key = (node.domain, node.op, schema.since_version)
        if key not in _cache:
            _cache[key] = _read(schema.function_body, node, version)
        return _with_defaults(_cache[key], schema)
    if not schema.has_context_dependent_function:
        return None
    versions = [v for v in schema.context_dependent_function_opset_versions if v <= version]
    message = onnx.helper.make_node(
        node.op,
        [f"x{i}" if a is not None else "" for i, a in enumerate(args)],
        list(node.outputs),
        domain=node.domain,
        **{name: _plain(value) for name, value in attributes.items()},
    )
    types = [_type(a).SerializeToString() for a in args]
    body = schema.get_context_dependent_function_with_opset_version(
        max(versions, default=schema.since_version), message.SerializeToString(), types
    )
    if not body:
        return None
    function = onnx.FunctionProto()
    function.ParseFromString(body)
    return _with_defaults(_read(function, node, version), schema)


def _with_defaults(function: Function | None, schema: onnx.defs.OpSchema) -> Function | None:
    """A body refers to attributes that the node may leave to the schema."""
    if function is None:
        return None
    defaults = {}
    for name, attribute in schema.attributes.items():
        if attribute.default_value.type:
            value = onnx.helper.get_attribute_value(attribute.default_value)
            defaults[name] = value.decode() if isinstance(value, bytes) else value
    return Function(
        function.domain,
        function.name,
        function.inputs,
        function.outputs,
        tuple(schema.attributes),
        {**defaults, **function.defaults},
        function.nodes,
        function.opsets,
    )


def _plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return onnx.numpy_helper.from_array(value.numpy())
    return value


def _type(x: object) -> onnx.TypeProto:
    if isinstance(x, (torch.Tensor, Narrow, np.ndarray)):
        shape = [n if isinstance(n, int) else None for n in x.shape]
        return onnx.helper.make_tensor_type_proto(code_of(x), shape)
    if isinstance(x, list):
        inner = _type(x[0]) if x else onnx.helper.make_tensor_type_proto(1, None)
        return onnx.helper.make_sequence_type_proto(inner)
    return onnx.TypeProto()
