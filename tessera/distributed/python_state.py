"""What a captured program took from Python: numbers and switches of a model's modules, functions, hooks, which weights
are trained.

In: a model and, for a step, its loss function. Out: at every call a number, another one for another state, by which
programs are told apart: who freezes a layer, puts a batch norm into eval mode or anneals a number gets a program that
does so, and who goes back gets the earlier one. What a forward itself changes is no such state: a program does not run
the model's Python again, and a warning says so.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass
from functools import partial
from operator import is_, itemgetter

import torch
from torch import Tensor, nn

from tessera.distributed.object_key import NUMBERS
from tessera.frontends.functional.trace import autocast_state
from tessera.torch_internals.autograd import hooks_of, leaf_states
from tessera.torch_internals.dispatch import DisableAutocast, is_any_autocast_enabled
from tessera.torch_internals.modules import HOOKS
from tessera.torch_internals.modules import hooks_of as hooks_of_module
from tessera.util.errors import CaptureError

INTERNAL = vars(nn.Module()).keys() - {"training", "_modules", *HOOKS}
PLAIN = (*NUMBERS, torch.dtype, torch.device, type)
SAME = (Tensor, types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)  # where they are the same
MOST = 64  # elements of a container that are compared
MANY = 8  # states: more of them are likely to be a number that changes at every call


@dataclass(frozen=True)
class _Names:
    """What a dictionary of names held; numbers and their like by what they are, functions and tensors by which."""

    where: str
    held: dict
    size: int
    plain: Callable | None
    values: object
    same: Callable | None
    objects: tuple

    @classmethod
    def of(cls, where: str, held: dict, every: bool = True) -> _Names:
        """Without `every`, names that come later are no change."""
        plain = [n for n, x in held.items() if n not in INTERNAL and _is_plain(x)]
        same = [n for n, x in held.items() if n not in INTERNAL and isinstance(x, SAME)]
        get, others = (itemgetter(*names, names[0]) if names else None for names in (plain, same))
        values = tuple(map(_copied, get(held))) if get else ()
        return cls(where, held, len(held) if every else -1, get, values, others, others(held) if others else ())

    def holds(self) -> bool:
        held = self.held
        try:
            return (
                self.size in (-1, len(held))
                and (self.plain is None or self.plain(held) == self.values)
                and (self.same is None or all(map(is_, self.same(held), self.objects)))
            )
        except KeyError:
            return False

    def differs(self) -> str:
        """The first name that holds something else by now."""
        other = _Names.of(self.where, self.held, self.size != -1)
        before, now = self.by_name(), other.by_name()
        changed = next((n for n in (*before, *now) if n not in before or n not in now or before[n] != now[n]), "")
        told = [f"{x[changed]!r}"[:60] if changed in x else "nothing" for x in (before, now)]
        return f"{self.where}.{changed} was {told[0]}, is {told[1]}"

    def by_name(self) -> dict[str, object]:
        plain = dict(zip(_names(self.plain), self.values, strict=False))  # type: ignore[call-overload]
        return plain | {n: _Which(x) for n, x in zip(_names(self.same), self.objects, strict=False)}


class _Which:
    """A function or a tensor, compared by which it is."""

    def __init__(self, x: object) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Which) and other.x is self.x

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"a {type(self.x).__name__}" if isinstance(self.x, Tensor) else getattr(self.x, "__name__", "a function")


def _names(get: Callable | None) -> tuple:
    return get.__reduce__()[1] if get is not None else ()  # type: ignore[return-value]


def _is_plain(x: object) -> bool:
    """Compared by what it is."""
    if isinstance(x, (list, tuple, set, frozenset)):
        return len(x) <= MOST and all(map(_is_plain, x))
    if isinstance(x, dict):  # modules and hooks compare as themselves
        return len(x) <= MOST and all(_is_plain(v) or (callable(v) and not isinstance(v, Tensor)) for v in x.values())
    return isinstance(x, PLAIN)


def _copied(x: object) -> object:
    if isinstance(x, dict):
        return {name: _copied(v) for name, v in x.items()}
    return type(x)(map(_copied, x)) if type(x) in (list, set, tuple) else x  # type: ignore[call-arg,arg-type]


class _State:
    """One state of Python, as it was when somebody looked."""

    def __init__(self, model: nn.Module, function: Callable | None) -> None:
        self.names = [*_of_model(model), *(_of_function(function) if function is not None else ())]
        self.weights = [m._parameters for m in model.modules() if m._parameters]
        self.hooks = function is not None  # in a step: see `refuse_hooks`
        self.trained = [_copied(x) for x in self._trained()]
        # asked at every call: the same as `names`, in the form that is looked through fastest
        self.held = [n.held for n in self.names if n.size != -1]
        self.sizes = [n.size for n in self.names if n.size != -1]
        self.plain = [(n.plain, n.held, n.values) for n in self.names if n.plain is not None]
        self.same = [(n.same, n.held, n.objects) for n in self.names if n.same is not None]

    def _trained(self) -> list:
        weights = [p for held in self.weights for p in held.values() if p is not None]
        return leaf_states(weights, self.hooks)

    def holds(self) -> bool:
        try:
            for get, held, values in self.plain:
                if get(held) != values:
                    return False
            for get, held, objects in self.same:
                if not all(map(is_, get(held), objects)):
                    return False
        except KeyError:
            return False
        return list(map(len, self.held)) == self.sizes and self._trained() == self.trained

    def differs(self) -> str:
        changed = next((names for names in self.names if not names.holds()), None)
        return changed.differs() if changed is not None else "other weights are trained"


def _of_model(model: nn.Module) -> Iterator[_Names]:
    for name, module in model.named_modules():
        where = f"{type(model).__name__}.{name}" if name else type(model).__name__
        yield _Names.of(where, vars(module))
        for key, x in vars(module).items():
            if (is_dataclass(x) and not isinstance(x, type)) or isinstance(x, types.SimpleNamespace):
                yield _Names.of(f"{where}.{key}", vars(x))


def _of_function(function: Callable) -> Iterator[_Names]:
    """Variables around a function that it reads."""
    code = getattr(function, "__code__", None)
    if code is None:
        return
    read = {n: x for n, x in function.__globals__.items() if n in code.co_names and isinstance(x, PLAIN)}
    if read:
        get = itemgetter(*read, next(iter(read)))
        yield _Names(function.__module__, function.__globals__, -1, get, get(function.__globals__), None, ())
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield _Names.of(function.__qualname__, _Cell(name, cell), False)


class _Cell(dict):
    """A variable of an outer function, as a dictionary of its name."""

    def __init__(self, name: str, cell: types.CellType) -> None:
        super().__init__({name: None})
        self.cell = cell

    def __getitem__(self, _: str) -> object:
        try:
            return self.cell.cell_contents
        except ValueError:  # nothing was bound to it yet
            return None

    def items(self) -> list:  # type: ignore[override]
        return [(name, self[name]) for name in self]


def refuse_hooks(model: nn.Module, in_step: bool) -> None:
    """Hooks on gradients inside of a program nobody would call."""
    for name, module in model.named_modules():
        if any(x for kind, x in hooks_of_module(module).items() if "backward" in kind):
            raise CaptureError(
                f"{name or type(model).__name__}: expected no backward hooks of modules, since backward is one "
                "program on a mesh; a hook on a weight's gradient runs where jit is called and .backward()"
            )
    for name, p in model.named_parameters() if in_step else ():
        if p.requires_grad and any(hooks_of(p)):
            raise CaptureError(
                f"{name}: expected no hook on its gradient, since a step on a mesh is one program; put what it does "
                "into the loss function, or call jit, .backward() and the optimizer, where hooks run"
            )


def casts_written() -> AbstractContextManager:
    """A program runs whose casts are written in it."""
    return DisableAutocast() if is_any_autocast_enabled() else nullcontext()


class PythonState:
    def __init__(self, model: nn.Module, function: Callable | None = None) -> None:
        self.model, self.function = model, function
        self.states: list[_State] = []
        self.now = -1
        self.key: tuple = ()  # of the last call
        self.why = ""  # the last new state is one

    def asked(self) -> tuple:
        """The key of the state that the model is in, and of the modes that a program is captured under."""
        self.key = self._number(), torch.get_default_dtype(), *autocast_state()
        return self.key

    def _number(self) -> int:
        if self.states and self.states[self.now].holds():
            return self.now
        found = next((n for n, state in enumerate(self.states) if state.holds()), None)
        if found is None:
            self.why = self.states[self.now].differs() if self.states else ""
            found = len(self.states)
            self.states.append(_State(self.model, self.function))
            if found == MANY:
                warnings.warn(
                    f"{self.why}: a program was compiled for {MANY} states of {type(self.model).__name__} and another "
                    "one for this; a number that changes often is better an argument or a buffer, which are tensors",
                    stacklevel=2,
                )
        self.now = found
        return found

    def settle(self) -> str:
        """Behind a capture: what the forward changed is the same state. Gives the change that asked for it."""
        state, why, self.why = self.states[self.now], self.why, ""
        if state.holds():
            return why
        changed = next((n for n in state.names if not n.holds()), None)
        if changed is not None and changed.size == len(changed.held):
            warnings.warn(
                f"{changed.differs()}: the forward changes it, which later calls on a mesh do not do again; expected a "
                "buffer, which programs write: register_buffer",
                stacklevel=2,
            )
        self.states[self.now] = _State(self.model, self.function)
        return why
