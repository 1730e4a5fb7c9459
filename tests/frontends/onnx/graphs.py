"""Small ONNX models for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
helper = onnx.helper
FLOAT, INT64, BOOL, STRING = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.INT64,
    onnx.TensorProto.BOOL,
    onnx.TensorProto.STRING,
)


def value(name: str, shape: Sequence[object] | None = None, element: int = FLOAT):
    return helper.make_tensor_value_info(name, element, shape)


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes):
    return helper.make_node(op, list(inputs), list(outputs), domain=domain, **attributes)


def constant(name: str, array) -> object:
    return onnx.numpy_helper.from_array(np.asarray(array), name)


def graph(nodes: Sequence, inputs: Sequence, outputs: Sequence, initializers: Sequence = (), name: str = "g"):
    """Inputs and outputs by name are tensors of floats."""

    def info(x):
        return value(x) if isinstance(x, str) else x

    return helper.make_graph(list(nodes), name, [*map(info, inputs)], [*map(info, outputs)], list(initializers))


def model(
    nodes: Sequence,
    inputs: Sequence,
    outputs: Sequence,
    initializers: Sequence = (),
    opset: int = 21,
    functions: Sequence = (),
    **domains: int,
):
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, v) for d, v in domains.items())]
    made = helper.make_model(
        graph(nodes, inputs, outputs, initializers), opset_imports=imports, functions=list(functions), ir_version=10
    )
    return made


def convolutional() -> bytes:
    """A file with weights, a shape that is computed and a sum."""
    shape = constant("s", np.array([0, -1]))
    body = [node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]), node("Relu", ["c"], ["r"])]
    body += [node("Shape", ["r"], ["n"]), node("Reshape", ["r", "s"], ["f"]), node("ReduceSum", ["f"], ["y"])]
    weights = constant("w", np.ones((2, 1, 3, 3), np.float32))
    return model(body, [value("x", [1, 1, 4, 4])], ["y"], [weights, shape]).SerializeToString()
