"""Trace to Trace: derivatives, batching, casts, recomputation. Importing this folder registers the rules of
operators that hold sub-traces."""

from tessera.transforms import control, custom

__all__ = ["control", "custom"]
