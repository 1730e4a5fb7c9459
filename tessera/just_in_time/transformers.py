"""Models of transformers that are compiled: `generate` calls them as they are.

With a static cache on a GPU, `generate` asks its model for `get_compiled_call`, which compiles the model's call once
more, with Inductor. A model that is compiled already answers with its own call. No class of transformers is changed: a
compiled model has a class of its own, which `own_call` gives the answer; a model whose `forward` was compiled has it
as an attribute of its own (`keep_own_call`), for as long as what was compiled lives. To generate with a model of which
only a submodule is compiled, pass `disable_compile=True`.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable

import torch

NAME = "get_compiled_call"


def own_call(cls: type) -> dict[str, Callable]:
    """What a compiled model's class has in place of a method of the model's class, where that has one."""
    return {NAME: lambda self, *_, **__: self.__call__} if hasattr(cls, NAME) else {}


def keep_own_call(fn: Callable, compiled: Callable) -> None:
    """The model whose method was compiled calls that, if it is its `forward`, as long as the compiled method lives."""
    model = getattr(fn, "__self__", None)
    if isinstance(model, torch.nn.Module) and hasattr(type(model), NAME):
        model.__dict__[NAME] = types.MethodType(get_compiled_call, model)  # bound: a copy of the model has its own
        weakref.finalize(compiled, _forget, weakref.ref(model)).atexit = False


def get_compiled_call(model: torch.nn.Module, *args: object, **kwargs: object) -> Callable:
    own = getattr(model.forward, "__tessera__", None) is not None
    return model.__call__ if own else getattr(type(model), NAME)(model, *args, **kwargs)


def _forget(of: weakref.ref) -> None:
    model = of()
    if model is not None and getattr(model.forward, "__tessera__", None) is None:
        model.__dict__.pop(NAME, None)
