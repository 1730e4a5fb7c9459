"""Dynamo's part in C: what the interpreter does with a frame, and the code that is kept for it.

Nothing here loads the rest of Dynamo.
"""

from __future__ import annotations

import types
from collections.abc import Callable

from tessera.torch_internals.lookup import symbol

_HOME = "torch._C._dynamo.eval_frame"
_SKIP = "leaving compiled backwards alone"
_action = symbol(f"{_HOME}._FrameAction", _SKIP)
_strategy = symbol(f"{_HOME}._FrameExecStrategy", _SKIP)
_set_strategy = symbol(f"{_HOME}.set_code_exec_strategy", _SKIP)
reset_code: Callable[[types.CodeType], None] = symbol(f"{_HOME}.reset_code", "freeing what was compiled of a function")
cache_entries: Callable[[types.CodeType], list] = symbol(
    f"{_HOME}._debug_get_cache_entry_list", "the guards that explain shows"
)


def skip_frames(code: types.CodeType) -> None:
    """Dynamo is to leave this code, and all that it calls, alone."""
    _set_strategy(code, _strategy(_action.SKIP, _action.SKIP))


def with_own_code(function: types.FunctionType) -> types.FunctionType:
    """The same function, in code that nobody else has: what Dynamo keeps, it keeps per code."""
    copied = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    return copied
