"""Models of transformers in which something is compiled: `generate` calls them as they are.

With a static cache on a GPU, `generate` asks its model for `get_compiled_call`, which compiles the model's call once
more, with Inductor. A model that is compiled, or one whose `forward` is, answers with its own call. No class of
transformers is changed for that: a compiled model has a class of its own, which answers (`own_call`); another model has
the answer as an attribute of its own (`keep_own_call`), for as long as what is compiled in it lives. A model of which
only a part is compiled asks Inductor all the same: pass `disable_compile=True` to its `generate`.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable

from torch import nn

NAME = "get_compiled_call"


def own_call(cls: type) -> dict[str, Callable]:
    """What a compiled model's class has in place of a method of the model's class, where that has one."""
    return {NAME: lambda self, *_, **__: self.__call__} if hasattr(cls, NAME) else {}


def keep_own_call(model: object, compiled: object) -> None:
    """A model, as long as something that was compiled lives, calls itself where that is in it."""
    if isinstance(model, nn.Module) and hasattr(type(model), NAME):
        model.__dict__[NAME] = types.MethodType(get_compiled_call, model)  # bound: a copy of the model has its own
        weakref.finalize(compiled, _forget, weakref.ref(model)).atexit = False


def get_compiled_call(model: nn.Module, /, *args: object, **kwargs: object) -> Callable:
    return model.__call__ if _in(model) else getattr(type(model), NAME)(model, *args, **kwargs)


def _in(model: nn.Module) -> bool:
    """Something in the model is compiled."""
    return any(getattr(x, "__tessera__", None) is not None for m in model.modules() for x in (m, m.forward))


def _forget(of: weakref.ref) -> None:
    model = of()
    if model is not None and not _in(model):
        model.__dict__.pop(NAME, None)
