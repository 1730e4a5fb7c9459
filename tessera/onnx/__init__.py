"""ONNX files, in and out: `load` a file as a module, `export` one, `register` what an operator of your own means."""

from tessera.exporters.onnx.errors import ExportError
from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.limits import Limits
from tessera.frontends.onnx.proto import onnx as _onnx  # noqa: F401  (first: it says what to install)
from tessera.onnx.arrays import prepare, prepare_warmup
from tessera.onnx.module import OnnxModule, load
from tessera.onnx.registration import register
from tessera.onnx.writing import export

__all__ = [
    "ExportError", "Limits", "OnnxError", "OnnxModule", "export", "load", "prepare", "prepare_warmup", "register",
]  # fmt: skip
