"""A function compiled by the tile executor, with a code object of its own: Dynamo keeps its cache on that."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import tessera


def compiled(function: Callable) -> Callable:
    assert isinstance(function, FunctionType)
    code = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return tessera.jit(copy, executors=["tile", "aten"])
