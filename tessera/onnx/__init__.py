"""ONNX files, in and out: `load` a file as a module, `export` one, `register` what an operator of your own means.

A name is looked up, and what it needs is imported, when it is first used: writing a file does without the compiler.
"""

import importlib
from typing import TYPE_CHECKING

from tessera.frontends.onnx.proto import onnx as _onnx  # noqa: F401  (first: it says what to install)
from tessera.util.garbage import collection_paused

if TYPE_CHECKING:
    from tessera.exporters.onnx.errors import ExportError
    from tessera.frontends.onnx.errors import OnnxError
    from tessera.frontends.onnx.limits import Limits
    from tessera.onnx.module import OnnxModule, load
    from tessera.onnx.prepared import prepare, prepare_warmup
    from tessera.onnx.registration import register
    from tessera.onnx.writing import export

__all__ = [
    "ExportError", "Limits", "OnnxError", "OnnxModule", "export", "load", "prepare", "prepare_warmup", "register",
]  # fmt: skip
_HOMES = {
    "ExportError": "tessera.exporters.onnx.errors",
    "Limits": "tessera.frontends.onnx.limits",
    "OnnxError": "tessera.frontends.onnx.errors",
    "OnnxModule": "tessera.onnx.module",
    "export": "tessera.onnx.writing",
    "load": "tessera.onnx.module",
    "prepare": "tessera.onnx.prepared",
    "prepare_warmup": "tessera.onnx.prepared",
    "register": "tessera.onnx.registration",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tessera.onnx' has no attribute {name!r}")
    with collection_paused():
        public = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return public
