"""The public functions: what a user imports from `tessera`."""

from __future__ import annotations

from tessera.inspection import edit, explain, stages, trace
from tessera.compiled import backend, jit

__all__ = ["backend", "edit", "explain", "jit", "stages", "trace"]
