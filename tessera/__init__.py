"""Tessera: a source-to-source deep-learning compiler for PyTorch."""

from tessera import ops
from tessera.api import backend, edit, explain, jit, stages, trace

__version__ = "0.1.0"
__all__ = ["__version__", "backend", "edit", "explain", "jit", "ops", "stages", "trace"]
