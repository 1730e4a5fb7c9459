"""The public functions: what a user imports from `tessera`."""

from __future__ import annotations

from tessera.jit import backend, jit

__all__ = ["backend", "jit"]
