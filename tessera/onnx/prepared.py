"""A model over NumPy arrays, as suites of ONNX test backends want it: `prepare(model)(arrays)` gives arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tessera.frontends.onnx.file import Source
from tessera.frontends.onnx.proto import onnx
from tessera.onnx.arrays import to_numpy, to_torch
from tessera.onnx.module import load


def prepare(source: Source) -> Callable[[Sequence[object]], list[object]]:
    """The model as a function of a list of arrays."""
    net = load(source).eval()

    def run(inputs: Sequence[object]) -> list[object]:
        with torch.no_grad():
            out = net(*map(to_torch, inputs))
        return [to_numpy(x) for x in (out if len(net.output_names) != 1 else (out,))]  # type: ignore[union-attr]

    return run


def prepare_warmup() -> None:
    """Compile something small, so that what compiling needs is imported; suites that fork call this before."""
    make = onnx.helper
    about = make.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4, 4])
    node = make.make_node("Relu", ["x"], ["y"])
    graph = make.make_graph([node], "warmup", [about], [make.make_empty_tensor_value_info("y")])
    opset = make.make_opsetid("", 13)
    prepare(make.make_model(graph, opset_imports=[opset]))([np.ones((4, 4), np.float32)])
