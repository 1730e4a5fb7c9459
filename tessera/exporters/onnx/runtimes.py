"""Who runs an ONNX file for us: ONNX Runtime, or the reference evaluator of the package onnx.

In: a model (a path or bytes) and arrays by input name. Out: arrays, in the order of the outputs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping

import numpy as np

from tessera.exporters.onnx.errors import ExportError

Run = Callable[[Mapping[str, np.ndarray]], list]
ORT, REFERENCE = "ort", "reference"
_LACKING = (
    "NOT_IMPLEMENTED", "can't be converted to MLDataType", "Unsupported model IR version", "is under development",
)  # fmt: skip


def preferred() -> str:
    """ONNX Runtime where it is installed."""
    return ORT if importlib.util.find_spec("onnxruntime") is not None else REFERENCE


def lacks(error: Exception) -> bool:
    """Whether ONNX Runtime refuses a model because it has no kernel for a type, as it has few for bfloat16, or because
    the model's version is newer than it."""
    return any(words in str(error) for words in _LACKING)


def runtime(kind: str, model: str | bytes, threads: int = 0) -> Run:
    """What runs the model; ONNX Runtime chooses how many threads it takes unless told. It reads no OMP_NUM_THREADS."""
    return _ort(model, threads) if kind == ORT else _reference(model)


def _ort(model: str | bytes, threads: int) -> Run:
    try:
        import onnxruntime  # type: ignore[import-not-found]
    except ImportError as error:
        raise ExportError("comparing with ONNX Runtime needs the package onnxruntime") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    # Products with weights of few bits in single precision: by default it rounds the other side to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    return lambda feeds: session.run(None, {k: v for k, v in feeds.items() if k in wanted})


def _reference(model: str | bytes) -> Run:
    """Local functions are put in place first. Inside them the evaluator knows no types, without which it cannot expand
    some operators, such as Gelu."""
    from onnx import load, load_from_string
    from onnx.inliner import inline_local_functions
    from onnx.reference import ReferenceEvaluator
    from onnx.shape_inference import infer_shapes

    read = load(model) if isinstance(model, str) else load_from_string(model)
    evaluator = ReferenceEvaluator(infer_shapes(inline_local_functions(read)))
    return lambda feeds: list(evaluator.run(None, dict(feeds)))
