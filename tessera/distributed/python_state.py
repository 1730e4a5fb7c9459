"""What a captured program took from Python: numbers and switches of a model's modules, functions, hooks, which weights
are trained, and whatever else its code reads (`python_reach.py`).

In: a model and, for a step, its loss function. Out: at every call a number, another one for another state, by which
programs are told apart: who freezes a layer, puts a batch norm into eval mode or anneals a number gets a program that
does so, and who goes back gets the earlier one. What a forward itself changes is no such state: a program does not run
the model's Python again, and a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from operator import is_

import torch
from torch import nn

from tessera.distributed.python_names import CONTAINERS, Cell, Names, Which, contents, said
from tessera.distributed.python_reach import Reach
from tessera.frontends.functional.trace import autocast_state
from tessera.torch_internals.autograd import hooks_of, leaf_states
from tessera.torch_internals.dispatch import DisableAutocast, is_any_autocast_enabled
from tessera.torch_internals.modules import hooks_of as hooks_of_module
from tessera.torch_internals.tracing import dict_version
from tessera.util.errors import CaptureError

MANY = 8  # states: more of them are likely to be a number that changes at every call


class _State:
    """One state of Python, as it was when somebody looked."""

    def __init__(self, model: nn.Module, function: Callable | None) -> None:
        reach = Reach(model, function)
        self.names, self.inside = reach.names(), reach.objects()
        self.weights = [m._parameters for m in model.modules() if m._parameters]
        self.hooks = function is not None  # in a step: see `refuse_hooks`
        self.trained = [*map(_copied, self._trained())]
        self._look()

    def _look(self) -> None:
        """What is asked at every call: the same as `names`, in the form that is looked through fastest."""
        self.tables: list[tuple[dict, Names, bool]] = []  # and whether it is within what the names hold
        self.empty: list[Collection] = []
        self.lists: list[tuple[Collection, tuple, Names]] = []  # and what was in them
        self.others: list[Names] = []
        for names in self.names:
            if type(names.held) is dict:
                self.tables.append((names.held, names, False))
            elif not isinstance(names.held, Cell):
                self.others.append(names)
            for x in names.objects[:-1]:
                self._look_into(x, names)
        self.variables = [names for names in self.names if isinstance(names.held, Cell)]
        self.cells = [names.held.cell for names in self.variables]  # type: ignore[attr-defined]
        self.bound = [contents(cell) for cell in self.cells]
        self.dicts = [held for held, _, _ in self.tables]
        self.versions = [*map(dict_version, self.dicts)]

    def _look_into(self, x: object, names: Names) -> None:
        """Containers in containers, as deep as they were told."""
        if not isinstance(x, (dict, *CONTAINERS)) or isinstance(said(x), Which):
            return
        if isinstance(x, dict):
            (self.tables.append((x, names, True)) if x else self.empty.append(x))
        elif not isinstance(x, (tuple, frozenset)):
            (self.lists.append((x, tuple(x), names)) if x else self.empty.append(x))
        for value in x.values() if isinstance(x, dict) else x:
            self._look_into(value, names)

    def _trained(self) -> list:
        weights = [p for held in self.weights for p in held.values() if p is not None]
        return leaf_states(weights, self.hooks)

    def holds(self) -> bool:
        if any(self.empty) or self._trained() != self.trained:
            return False
        moved = [names for names in self.others if not names.same_objects()]
        if not all(map(is_, map(contents, self.cells), self.bound)):
            moved += (names for names in self.variables if not names.same_objects())
        moved += (names for x, held, names in self.lists if len(x) != len(held) or not all(map(is_, x, held)))
        if (versions := [*map(dict_version, self.dicts)]) != self.versions:
            pairs = zip(self.tables, versions, self.versions, strict=True)
            again = [(names, within) for (_, names, within), now, was in pairs if now != was]
            moved += (names for names, within in again if within or not names.same_objects())
        if not all(names.holds() for names in moved):
            return False
        self.versions = versions
        if moved:  # other objects that say the same
            self._look()
        return True

    def same(self, other: _State) -> bool:
        """The same by what objects say, other ones though they be."""
        return self.trained == other.trained and self._form() == other._form()

    def _form(self) -> list:
        return [(n.where, {name: self._kind(x) for name, x in n.told.items()}) for n in self.names]

    def _kind(self, x: object) -> object:
        return type(x.x) if isinstance(x, Which) and id(x.x) in self.inside else x

    def changed(self) -> Names | None:
        return next((names for names in self.names if not names.holds()), None)

    def differs(self) -> str:
        changed = self.changed()
        return changed.differs() if changed is not None else "other weights are trained"


def _copied(x: object) -> object:
    """Hooks are in dictionaries of PyTorch's own."""
    if isinstance(x, dict):
        return {name: _copied(v) for name, v in x.items()}
    return tuple(map(_copied, x)) if isinstance(x, tuple) else x


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
        return self._new() if found is None else self._is(found)

    def _new(self) -> int:
        """A state that nobody has seen, but maybe with other objects."""
        state = _State(self.model, self.function)
        if (found := next((n for n, other in enumerate(self.states) if state.same(other)), None)) is not None:
            self.states[found] = state
            return self._is(found)
        self.why = self.states[self.now].differs() if self.states else ""
        if len(self.states) == MANY:
            warnings.warn(
                f"{self.why}: a program was compiled for {MANY} states of {type(self.model).__name__} and another "
                "one for this; a number that changes often is better an argument or a buffer, which are tensors",
                stacklevel=2,
            )
        self.states.append(state)
        return self._is(len(self.states) - 1)

    def _is(self, found: int) -> int:
        self.now = found
        return found

    def settle(self) -> str:
        """Behind a capture: what the forward changed is the same state. Gives the change that asked for it."""
        state, why, self.why = self.states[self.now], self.why, ""
        if state.holds():
            return why
        changed = state.changed()
        if changed is not None and changed.rebound():
            warnings.warn(
                f"{changed.differs()}: the forward changes it, which later calls on a mesh do not do again; expected a "
                "buffer, which programs write: register_buffer",
                stacklevel=2,
            )
        self.states[self.now] = _State(self.model, self.function)
        return why
