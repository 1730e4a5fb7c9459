"""jaxlib's MLIR bindings: the one place that imports them, and the context that knows every dialect a program may use.

They are an extra (`pip install tessera[stablehlo]`); jax itself is not needed.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

from tessera.util.errors import TesseraError


class MissingExtraError(TesseraError, ImportError):
    """A package that this needs is not installed; the message says how to get it."""


@functools.cache
def bindings() -> SimpleNamespace:
    """The modules of jaxlib that read MLIR."""
    try:
        ir = importlib.import_module("jaxlib.mlir.ir")
        stablehlo = importlib.import_module("jaxlib.mlir.dialects.stablehlo")
        chlo = importlib.import_module("jaxlib.mlir.dialects.chlo")
        sdy = importlib.import_module("jaxlib.mlir.dialects.sdy")
        upstream = importlib.import_module("jaxlib.mlir._mlir_libs._jax_mlir_ext")
        passes = importlib.import_module("jaxlib.mlir.passmanager")
    except ImportError as error:
        raise MissingExtraError(
            "StableHLO programs are read with jaxlib, which is not installed; pip install 'tessera[stablehlo]'"
        ) from error
    stablehlo.register_stablehlo_passes()
    return SimpleNamespace(ir=ir, stablehlo=stablehlo, chlo=chlo, sdy=sdy, upstream=upstream, passes=passes)


def context() -> Any:
    """A context with the dialects of StableHLO programs."""
    b = bindings()
    mlir = b.ir.Context()
    registry = b.ir.DialectRegistry()
    b.upstream.register_dialects(registry)
    mlir.append_dialect_registry(registry)
    mlir.load_all_available_dialects()
    for dialect in (b.sdy, b.chlo, b.stablehlo):
        dialect.register_dialect(mlir)
    mlir.allow_unregistered_dialects = True
    with mlir:  # The bindings cannot name the dialect of quantized types. This pass needs it, so running it loads it.
        b.passes.PassManager.parse("builtin.module(vhlo-legalize-to-stablehlo)").run(
            b.ir.Module.parse("module {}").operation
        )
    return mlir
