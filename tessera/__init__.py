"""Tessera: a source-to-source deep-learning compiler for PyTorch."""

from tessera import ops

__version__ = "0.1.0"
__all__ = ["__version__", "ops"]
