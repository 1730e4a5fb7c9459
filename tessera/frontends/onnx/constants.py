"""Tensors that nodes make of nothing, as initializers.

In: a Model. Out: the same, where a `ConstantOfShape` over a known shape is an initializer: it is made once, and where
it is a weight it can be trained. Weights that stand in `Constant` nodes become initializers too.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from tessera.frontends.onnx.limits import Limits
from tessera.frontends.onnx.structure import Graph, Model, Node

# Inputs that are weights.
WEIGHTS = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Gemm": (1, 2),
    "MatMul": (0, 1),
    "BatchNormalization": (1, 2, 3, 4),
    "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "RMSNormalization": (1,),
    "PRelu": (1,),
    "RNN": (1, 2, 3),
    "GRU": (1, 2, 3),
    "LSTM": (1, 2, 3),
}


def with_initializers(model: Model, limits: Limits) -> Model:
    graph = model.graph
    weights = {n for node in graph.nodes for i in WEIGHTS.get(node.op, ()) for n in node.inputs[i : i + 1]}
    initializers, nodes, room = dict(graph.initializers), [], 2 * limits.tensor_bytes
    for node in graph.nodes:
        value = _value(node, graph, weights, limits)
        if value is None or value.nbytes > room:
            nodes.append(node)
        else:
            initializers[node.outputs[0]] = value
            room -= value.nbytes
    if len(nodes) == len(graph.nodes):
        return model
    return replace(model, graph=replace(graph, initializers=initializers, nodes=tuple(nodes)))


def _value(node: Node, graph: Graph, weights: set[str], limits: Limits) -> torch.Tensor | None:
    if node.domain or not node.outputs or not node.outputs[0]:
        return None
    value = node.attributes.get("value")
    if node.op == "Constant" and node.outputs[0] in weights:
        return value if isinstance(value, torch.Tensor) and value.is_floating_point() else None
    if node.op != "ConstantOfShape" or not node.inputs:
        return None
    shape = graph.initializers.get(node.inputs[0])
    if not isinstance(shape, torch.Tensor) or shape.ndim != 1 or shape.dtype != torch.int64:
        return None
    fill = torch.zeros(1) if value is None else value
    if not isinstance(fill, torch.Tensor) or fill.numel() != 1 or not fill.is_floating_point():
        return None
    sizes, dtype = shape.tolist(), fill.dtype
    if any(n < 0 for n in sizes) or math.prod(sizes) * dtype.itemsize > limits.tensor_bytes:
        return None  # the operator says what is wrong
    return torch.full(sizes, fill.item(), dtype=dtype)
