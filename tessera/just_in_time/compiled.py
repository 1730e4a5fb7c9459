"""Jitted functions and modules: the state behind each, and how they are called.

A compiled module shares its whole state with the original (`state_dict`, parameters, hooks and attributes are the
model's own); only calling it differs.
"""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from tessera.frontends.dynamo.breaks import last_counted
from tessera.frontends.dynamo.lines import QUIET
from tessera.frontends.dynamo.module_hooks import ModuleHooks
from tessera.func.dispatch import Dispatcher
from tessera.ir.record import recording
from tessera.just_in_time.backend import Backend
from tessera.just_in_time.transformers import keep_own_call, own_call
from tessera.pipeline.compilation import Compilation
from tessera.torch_internals import dynamo
from tessera.torch_internals.dynamo import InternalTorchDynamoError, TorchRuntimeError
from tessera.util.config import config
from tessera.util.errors import TesseraError

# Some of Dynamo's own assertions come as they are.
DYNAMO_ERRORS = (TorchRuntimeError, InternalTorchDynamoError, AssertionError)
# Told of every jitted function when it is made; the command line collects them here. Empty otherwise.
WATCHERS: list[Callable[[Compiled], None]] = []


class Compiled:
    """State of one jitted callable; `stages`, `edit` and `explain` look here."""

    def __init__(
        self,
        fn: Callable,
        backend: Backend | Dispatcher,
        call: Callable,
        again: Callable,
        anew: Callable[[], Callable] | None = None,
    ) -> None:
        """`anew` gives a call that has compiled nothing yet."""
        self.fn, self.backend, self.call = fn, backend, call
        looks = isinstance(fn, torch.nn.Module) and anew is not None
        self.hooks: ModuleHooks[Callable] | None = ModuleHooks(fn) if looks else None
        self.anew = anew
        self.failures = 0
        self.owner: object = None  # the function that carries this state
        self.floor: object = None  # where it stands against its floor, if it was profiled; `explain` tells it
        self.again = again  # compiles something else with the same options
        if isinstance(backend, Backend):
            self.call = self.first_call(call, backend)
        for tell in WATCHERS:
            tell(self)

    def first_call(self, call: Callable, backend: Backend) -> Callable:
        """Dynamo may give up on a whole function without a word: then no graph says why."""

        def first(*args: object, **kwargs: object) -> object:
            last_counted()
            out = call(*args, **kwargs)
            if not backend.graphs and (reason := last_counted()):
                eager = "Dynamo found nothing that it could compile"
                backend.graphs.append(backend.next_record(break_reason=reason, eager_reason=eager))
            self.call = call
            return out

        return first

    def look_at_hooks(self) -> None:
        """Dynamo compiles a module's hooks with it and does not see when they change: then it begins anew."""
        assert self.hooks is not None and self.anew is not None
        changed, call = self.hooks.changed(self.call)
        if changed:
            self.call = call or self.anew()

    def recover(self, error: Exception) -> Callable:
        """Dynamo itself failed. If none of the user's code has run yet, what this gives runs the call eagerly."""
        strict = self.backend.strict if isinstance(self.backend, Backend) else None
        if isinstance(error, AssertionError) and not _of_dynamo(error):
            raise error
        if (strict if strict is not None else config.strict) or _user_code_ran(error):
            raise error
        self.failures += 1
        reason = str(error).strip().splitlines()[0]
        if isinstance(self.backend, Backend):
            self.backend.graphs.append(self.backend.next_record(eager_reason=reason))
        if self.failures >= 3:  # Dynamo would try, and fail, at every call
            self.call = self.fn
        return self.fn

    def compilations(self) -> list[Compilation]:
        if isinstance(self.backend, Dispatcher):
            return self.backend.compilations
        return [g.compilation for g in self.backend.graphs if g.compilation is not None]


def _user_code_ran(error: BaseException) -> bool:
    """A frame of the user's own between our call and the failure means that part of the call was carried out."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(not frame.filename.startswith(QUIET) for frame in frames)


def _of_dynamo(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename.startswith(dynamo.FOLDER)


def compiled_state(fn: object) -> Compiled | None:
    """The state of a jitted callable; a function made from one (`functools.wraps`) only carries its attributes."""
    state = getattr(fn, "__tessera__", None)
    owner = getattr(state, "owner", None)
    return state if owner is None or owner is fn else None


def wrap(fn: Callable, state: Compiled) -> Callable:
    return _compiled_module(fn, state) if isinstance(fn, torch.nn.Module) else _compiled_function(fn, state)


def _compiled_function(fn: Callable, state: Compiled) -> Callable:
    @functools.wraps(fn)
    def compiled(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        if recording() is not None:  # inside a transform: be traced as the plain function
            return fn(*args, **kwargs)
        try:
            return state.call(*args, **kwargs)
        except DYNAMO_ERRORS as error:
            eager = state.recover(error)
        return eager(*args, **kwargs)  # out here, so that what eager raises does not tell of Dynamo's error too

    state.owner = compiled
    compiled.__tessera__ = state  # type: ignore[attr-defined]
    keep_own_call(getattr(fn, "__self__", None), compiled)
    return compiled


_module_classes: dict[type, type] = {}


def _compiled_module(module: torch.nn.Module, state: Compiled) -> torch.nn.Module:
    """An object of the model's own class that shares its `__dict__`; only calling it differs."""
    cls = type(module)
    if cls not in _module_classes:
        _module_classes[cls] = type(
            f"Compiled{cls.__name__}", (_ModuleCall, cls), {"__module__": cls.__module__, **own_call(cls)}
        )
    wrapped = object.__new__(_module_classes[cls])
    object.__setattr__(wrapped, "__dict__", module.__dict__)
    _states[id(wrapped)] = state
    return wrapped


_states: dict[int, Compiled] = {}


class _ModuleCall:
    """What a compiled module does otherwise than the model whose state it shares."""

    @property
    def __tessera__(self) -> Compiled:
        return _states[id(self)]

    def __call__(self, /, *args, **kwargs):  # noqa: ANN002, ANN003, ANN204
        state = _states[id(self)]
        if recording() is not None:
            return state.fn(*args, **kwargs)
        if state.hooks is not None and (state.hooks.seen != RemovableHandle.next_id or state.hooks.some):
            state.look_at_hooks()
        try:
            return state.call(*args, **kwargs)
        except DYNAMO_ERRORS as error:
            eager = state.recover(error)
        return eager(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> torch.nn.Module:
        state = _states[id(self)]
        return state.again(copy.deepcopy(state.fn, memo))  # type: ignore[return-value]

    def __reduce__(self) -> tuple:
        raise TesseraError("a compiled module is not pickled; save the model's state_dict, or the model itself")

    def __del__(self) -> None:
        if _states is not None:  # None while the interpreter shuts down
            _states.pop(id(self), None)
