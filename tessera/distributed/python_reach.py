"""What of Python a model's functions may read.

In: a model and, for a step, its loss function. Out: `Names` of its modules, and of what their code leads to: globals
that it loads, variables of outer functions, objects, classes and files whose attributes it names. Code is followed
through functions and methods, but not into Python's own library or PyTorch; of installed packages, methods of what the
model holds are followed, and no further functions, which would soon be all of a package. What is no module of the model
is looked into only as far as code names its attributes: a counter that no forward reads is no change.
"""

from __future__ import annotations

import argparse
import dis
import sys
import types
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, is_dataclass
from functools import cache, cached_property, partial
from pathlib import Path

from torch import Tensor, nn

from tessera.distributed.python_names import INTERNAL, MOST, PLAIN, Cell, Names, Slots, of_class
from tessera.torch_internals.modules import hooks_of_all_modules

LIBRARIES = sys.stdlib_module_names | {"torch", "tessera", "numpy", "builtins"}
EVERY = (types.FunctionType, type, types.ModuleType)
LEFT = {"globals": EVERY, "file": EVERY, "class": type}  # what is not followed in installed packages
SPACES = (types.SimpleNamespace, argparse.Namespace)
COMPUTED = {"vars", "__dict__", "asdict"}  # whose names the code does not say
CALLED = {"forward", "__call__", "__getattr__", "__getattribute__", "__getitem__"}
MADE = {"__init__", "__new__", "__post_init__"}


@dataclass(frozen=True)
class Code:
    """Names in a function's code, and in those of functions within."""

    loads: frozenset[str]  # from the globals of its file
    names: frozenset[str]  # attributes, and texts that may be such
    computed: bool  # it makes names as it runs


@cache
def names_in(code: types.CodeType) -> Code:
    parts = [names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    steps = list(dis.get_instructions(code))
    loads = {i.argval for i in steps if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    names = {i.argval for i in steps if i.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")}
    names |= {c for c in code.co_consts if isinstance(c, str) and c.isidentifier()}
    formats = "getattr" in loads and any(i.opname.startswith(("FORMAT_", "BUILD_STRING")) for i in steps)
    return Code(
        frozenset(loads).union(*(p.loads for p in parts)),
        frozenset(names).union(*(p.names for p in parts)),
        formats or bool(COMPUTED & (loads | names)) or any(p.computed for p in parts),
    )


@dataclass(frozen=True)
class _Holder:
    where: str
    held: Mapping
    read: Set[str] | None  # these names count; None: all
    package: bool  # it is a file's or class's of an installed package


class Reach:
    def __init__(self, model: nn.Module, function: Callable | None) -> None:
        self.read, self.computed = set(CALLED), False
        self.holders: dict[tuple, _Holder] = {}  # by what they are and whose
        self.visited: set[tuple] = set()
        self.module(type(model).__name__, model)
        for kind, hooks in hooks_of_all_modules().items():
            self.hold((kind,), "every module", {kind: hooks})
        if function is not None:
            self.value(getattr(function, "__qualname__", type(function).__name__), function)
        while self.follow():
            pass

    def names(self) -> list[Names]:
        return [Names(h.where, h.held, None if self.all_of(h) else h.read) for h in self.holders.values()]

    def objects(self) -> set[int]:
        """Those whose attributes are looked at by themselves."""
        return {key[1] for key in self.holders if key[0] in ("object", "slots")}

    def follow(self) -> bool:
        """Into what is held by names that are read by now; was there more?"""
        new = [
            (key, holder, name)
            for key, holder in self.holders.items()
            for name in self.counted(holder)
            if (*key, name) not in self.visited
        ]
        for key, holder, name in new:
            self.visited.add((*key, name))
            x = holder.held[name]
            if not holder.package or not isinstance(x, LEFT.get(key[0], ())):
                self.value(f"{holder.where}.{name}", x)
        return bool(new)

    def counted(self, holder: _Holder) -> Set[str]:
        held = holder.held.keys()
        return held - INTERNAL if self.all_of(holder) else held & holder.read  # type: ignore[operator]

    def all_of(self, holder: _Holder) -> bool:
        return holder.read is None or (self.computed and holder.read is self.read)

    def hold(self, key: tuple, where: str, held: Mapping, read: Set[str] | None = None, file: str = "") -> None:
        if key not in self.holders:
            self.holders[key] = _Holder(where, held, read, _installed(file))

    # --- what there is ---

    def value(self, where: str, x: object) -> None:
        match x:
            case nn.Module():
                self.module(where, x)
            case types.FunctionType():
                self.function(x)
            case types.MethodType() | staticmethod() | classmethod():
                self.value(where, x.__func__)
                self.value(where, getattr(x, "__self__", None))
            case partial():
                for part in (x.func, *x.args, *x.keywords.values()):
                    self.value(where, part)
            case property():
                self.value(where, x.fget)
            case cached_property():
                self.value(where, x.func)
            case type():
                self.kind(x, CALLED | MADE)
            case types.ModuleType():
                if not _of_library(x.__name__):
                    self.hold(("file", id(x)), x.__name__, vars(x), self.read, x.__name__)
            case dict() | list() | tuple() | set() | frozenset():
                self.every(where, x)
            case _ if not isinstance(x, (Tensor, *PLAIN)):
                self.object(where, x)

    def every(self, where: str, x: Collection) -> None:
        """What is in a container."""
        parts = list(x.items() if isinstance(x, dict) else enumerate(x))
        for n, v in parts[:MOST]:
            if not isinstance(v, (Tensor, *PLAIN)) and ("in", id(x), n) not in self.visited:
                self.visited.add(("in", id(x), n))
                self.value(f"{where}[{n!r}]", v)

    def module(self, where: str, module: nn.Module) -> None:
        for name, m in module.named_modules():
            self.hold(("module", id(m)), f"{where}.{name}" if name else where, vars(m))
            self.kind(type(m), CALLED)

    def object(self, where: str, x: object) -> None:
        if hasattr(type(x), "__wrapped__") or "__wrapped__" in getattr(x, "__dict__", ()):
            self.value(where, x.__wrapped__)  # type: ignore[attr-defined]
        cls = type(x)
        if _of_library(cls.__module__) and not isinstance(x, SPACES) and not is_dataclass(x):
            return
        if hasattr(x, "__dict__"):
            self.hold(("object", id(x)), where, vars(x), self.read)
        if slots := [n for base in cls.__mro__ for n in _listed(base.__dict__.get("__slots__", ()))]:
            self.hold(("slots", id(x)), where, Slots(x, slots), self.read)
        self.kind(cls, CALLED)

    def kind(self, kind: type, called: Set[str]) -> None:
        """A class, and those that it is made of."""
        for cls in kind.__mro__:
            if _of_library(cls.__module__):
                if issubclass(cls, nn.Module) and cls is not nn.Module:
                    self.hold(("class", id(cls)), cls.__name__, of_class(cls), CALLED)
                continue
            self.hold(("class", id(cls)), cls.__name__, of_class(cls), self.read, cls.__module__)
            for name in called & vars(cls).keys():
                self.value(f"{cls.__name__}.{name}", vars(cls)[name])

    def function(self, function: types.FunctionType) -> None:
        if ("code", id(function)) in self.visited or _of_library(function.__module__ or ""):
            return
        self.visited.add(("code", id(function)))
        code, there = names_in(function.__code__), function.__globals__
        self.read |= code.names
        self.computed |= code.computed
        key = ("globals", id(there))
        self.hold(key, function.__module__, there, set(), function.__module__)
        self.holders[key].read.update(code.loads)  # type: ignore[union-attr]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.hold(("cell", id(cell)), function.__qualname__, Cell(name, cell))


def _of_library(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES


@cache
def _installed(name: str) -> bool:
    where = getattr(sys.modules.get(name), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(where).parts)


def _listed(slots: str | Collection[str]) -> Collection[str]:
    return (slots,) if isinstance(slots, str) else slots
