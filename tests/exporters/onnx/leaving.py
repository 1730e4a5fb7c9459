"""Functions and models as ONNX, run by others: what the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import torch

from tessera.exporters.onnx.compare import compare
from tessera.exporters.onnx.file import with_weights
from tessera.exporters.onnx.graph import as_real
from tessera.exporters.onnx.model import to_model
from tessera.exporters.onnx.program import Program, cleaned
from tessera.exporters.onnx.runtimes import runtime
from tessera.frontends.captured import capture
from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.onnx import load
from tessera.onnx.arrays import to_numpy, to_torch
from tessera.ops.op import keep_whole
from tessera.torch_internals import pytree


def written(fn: Callable, inputs: tuple[torch.Tensor, ...], opset: int) -> onnx.ModelProto:
    """A function over tensors as an ONNX model, without torch.export in between."""
    mode = fake.default_mode()
    names = [f"x{i}" for i in range(len(inputs))]
    fakes: list[object] = [mode.from_tensor(x, static_shapes=True) for x in inputs]
    with torch.no_grad():
        captured = capture(lambda *xs: pytree.tree_leaves(fn(*xs)), fakes, names, keep_whole, Builder("fn", mode))
    trace = cleaned(captured.trace.with_(outputs=captured.trace.outputs[: captured.outputs]))
    outputs = [(f"y{i}", o) for i, o in enumerate(trace.outputs)]
    program = Program(trace, mode, {}, dict(zip(trace.inputs, names, strict=True)), outputs)
    return with_weights(*to_model(program, opset))


def answers(model: onnx.ModelProto, inputs: tuple[torch.Tensor, ...], by: str) -> list[torch.Tensor]:
    """What a model gives: by onnx's reference evaluator, by ONNX Runtime, or by our own interpreter."""
    if by == "tessera":
        out = load(model, compile=False)(*inputs)
        return list(out) if isinstance(out, (tuple, list)) else [out]
    feeds = {i.name: to_numpy(as_real(x.detach())) for i, x in zip(model.graph.input, inputs, strict=True)}
    return [to_torch(x) for x in runtime(by, model.SerializeToString())(feeds)]  # type: ignore[misc,arg-type]


def assert_same(got: list[torch.Tensor], expected: object) -> None:
    wanted = [x for x in pytree.tree_leaves(expected) if isinstance(x, torch.Tensor)]
    assert len(got) == len(wanted)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert not (problem := compare(f"output {i}", a, as_real(b.detach())).problem), problem
