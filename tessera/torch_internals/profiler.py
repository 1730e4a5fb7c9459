"""The profiler's cheapest range."""

from __future__ import annotations

from tessera.torch_internals.lookup import symbol

RecordFunctionFast = symbol("torch._C._profiler._RecordFunctionFast", "the profiler's ranges, one an equation")
