"""ONNX files to measure with: nine networks of the model zoo, and a BERT and a GPT that torch.onnx writes.

The zoo's graphs come with the package onnx, without weights: nodes give constants in their place. `write` puts random
numbers there, scaled so that values stay of one size from layer to layer.
"""

from __future__ import annotations

import math
import os

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from tessera.tools.bench.format_names import ZOO
from tessera.tools.format_probe import SIZES, example, model


def inputs(name: str) -> tuple[Tensor, ...]:
    """What a network of the name is called with."""
    torch.manual_seed(0)
    ids = example()
    return (torch.randn(1, 3, 224, 224),) if name in ZOO else (ids, torch.ones_like(ids)) if name == "bert" else (ids,)


def write(name: str, path: str) -> None:
    if name in ZOO:
        onnx.save(_zoo(name), path)
        return
    dims = {d: torch.export.Dim(size, min=low, max=high) for d, (size, low, high) in SIZES["idx"].items()}
    args = inputs(name)
    torch.onnx.export(module(name), args, path, dynamo=True, dynamic_shapes=tuple(dims for _ in args), verbose=False)


def module(name: str) -> torch.nn.Module:
    """The networks that PyTorch has, too."""
    return Bert() if name == "bert" else model()


class Bert(torch.nn.Module):
    """Of the GPT's sizes, with a mask of padding."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=1000, hidden_size=128, num_hidden_layers=12, num_attention_heads=4, intermediate_size=512,
            max_position_embeddings=128,
        )  # fmt: skip
        self.bert = BertModel(config).eval()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.bert(input_ids=ids, attention_mask=mask, return_dict=False)[0]


def _zoo(name: str) -> onnx.ModelProto:
    folder = os.path.join(os.path.dirname(onnx.__file__), "backend", "test", "data", "light")
    network = onnx.load(os.path.join(folder, f"light_{name}.onnx"))
    graph, rng = network.graph, np.random.default_rng(0)
    shapes = {t.name: tuple(numpy_helper.to_array(t).tolist()) for t in graph.initializer if t.name.endswith("__SHAPE")}
    readers = {x: (node.op_type, place) for node in reversed(graph.node) for place, x in enumerate(node.input)}
    nodes, weights = [], [t for t in graph.initializer if t.name not in shapes]
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in shapes:
            values = _weight(shapes[node.input[0]], *readers.get(node.output[0], ("", 0)), rng)
            weights.append(numpy_helper.from_array(values.astype(np.float32), node.output[0]))
        else:
            nodes.append(node)
    read = {x for node in nodes for x in node.input}
    given = [i for i in graph.input if i.name in read and i.name not in {w.name for w in weights}]
    kept = onnx.helper.make_graph(nodes, name, given, graph.output, weights)
    return onnx.helper.make_model(
        kept, opset_imports=network.opset_import, ir_version=max(network.ir_version, 4)
    )  # weights are no inputs


def _weight(shape: tuple[int, ...], op: str, place: int, rng: np.random.Generator) -> np.ndarray:
    normal = rng.standard_normal(shape)
    if op == "BatchNormalization" and place in (1, 4):  # scales and variances
        return 1 + 0.1 * np.abs(normal)
    if len(shape) < 2 or op not in ("Conv", "Gemm", "MatMul"):
        return 0.1 * normal
    return normal * math.sqrt((2 if op == "Conv" else 1) / math.prod(shape[1:]))
