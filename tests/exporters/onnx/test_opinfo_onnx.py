"""PyTorch's own samples of every operator, by way of ONNX Runtime: a right answer, or an error that says why not."""

from __future__ import annotations

import onnx
import pytest
import torch
from leaving import answers, assert_same
from torch.testing._internal.common_methods_invocations import op_db

from tessera.exporters.onnx.errors import ExportError
from tessera.exporters.onnx.graph import as_real
from tessera.onnx import export
from tessera.torch_internals import pytree
from tessera.util.errors import CaptureError

pytestmark = pytest.mark.sweep

SAMPLES = 2
LEFT_OUT = ("empty", "jiterator", "sparse")  # results that are uninitialised, and what is no plain tensor
CASES = [op for op in op_db if torch.float32 in op.dtypes and not any(part in op.name for part in LEFT_OUT)]


def numbered(op) -> str:
    return f"{op.name}.{op.variant_test_name}".rstrip(".")


@pytest.mark.parametrize("op", CASES, ids=numbered)
def test_samples_of_an_operator(op) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", torch.float32))
    for sample in samples[:: max(1, len(samples) // SAMPLES)][:SAMPLES]:
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        tensors = tuple(leaves[i] for i in places)

        def call(*given: torch.Tensor, leaves=leaves, spec=spec, places=places) -> list[torch.Tensor]:
            full = list(leaves)
            for i, x in zip(places, given, strict=True):
                full[i] = x
            first, args, kwargs = pytree.tree_unflatten(full, spec)
            return [x for x in pytree.tree_leaves(op.op(first, *args, **kwargs)) if isinstance(x, torch.Tensor)]

        expected = call(*(x.clone() for x in tensors))
        if not expected:
            pytest.skip("no tensors come out")
        try:
            model = export(call, tensors, check=False)
        except (ExportError, CaptureError) as reason:
            pytest.skip(str(reason).splitlines()[0])
        assert model is not None
        given = answers(model, tensors, _runtime(model))[: len(expected)]
        if _draws(model):  # by the runtime's own generator
            assert [(x.shape, x.dtype) for x in given] == [(x.shape, x.dtype) for x in map(as_real, expected)]
        else:
            assert_same(given, expected)


def _draws(model: onnx.ModelProto) -> bool:
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    return any(node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial") for node in nodes)


def _runtime(model: onnx.ModelProto) -> str:
    """ONNX Runtime hands over no tensors of 16 bits with 8 of exponent: NumPy has none."""
    narrow = any(o.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16 for o in model.graph.output)
    return "reference" if narrow else "ort"
