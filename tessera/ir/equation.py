"""Values and equations, the words of a Trace.

    eqn    ::= outputs = op(args, kwargs)  @source
    arg    ::= Value | number | str | dtype | device | symbolic size | Trace | list/tuple of args | None

An equation is immutable. `op` is a PyTorch operator overload, or a `Special` where PyTorch has none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from tessera.ir.formula import Formula
from tessera.ir.kernel import Kernel
from tessera.ir.schema import bind
from tessera.ir.types import SYMBOLIC, Size, TensorType, Type
from tessera.torch_internals.operators import OpOverload, aten_name
from tessera.util.stack import Stack

Arg = object

# Builders now emitting, innermost last. Arithmetic on Values goes to the last one, so that a rule can be
# written as `ct * aten.cos(x)`.
ACTIVE: Stack[Emitter] = Stack()


class Emitter(Protocol):
    def call(self, name: str, *args: Arg, **kwargs: Arg) -> Any: ...


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    name: str
    type: Type

    def __repr__(self) -> str:
        return f"{self.name}: {self.type}"

    def __add__(self, other: Arg) -> Value:
        return ACTIVE[-1].call("add", self, other)

    def __sub__(self, other: Arg) -> Value:
        return ACTIVE[-1].call("sub", self, other)

    def __mul__(self, other: Arg) -> Value:
        return ACTIVE[-1].call("mul", self, other)

    def __truediv__(self, other: Arg) -> Value:
        return ACTIVE[-1].call("div", self, other)

    def __rsub__(self, other: Arg) -> Value:
        return ACTIVE[-1].call("rsub", self, other)

    def __rtruediv__(self, other: Arg) -> Value:
        return ACTIVE[-1].call("mul", ACTIVE[-1].call("reciprocal", self), other)

    def __neg__(self) -> Value:
        return ACTIVE[-1].call("neg", self)

    def __pow__(self, other: Arg) -> Value:
        return ACTIVE[-1].call("pow", self, other)

    __radd__ = __add__
    __rmul__ = __mul__

    @property
    def shape(self) -> tuple[Size, ...]:
        return self.tensor.shape

    @property
    def ndim(self) -> int:
        return len(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def is_differentiable(self) -> bool:
        """A tensor of floating-point or complex numbers."""
        return isinstance(self.type, TensorType) and self.type.is_differentiable

    def numel(self) -> int:
        """Elements; a number is one."""
        return self.type.numel() if isinstance(self.type, TensorType) else 1

    def nbytes(self) -> int:
        """Bytes of memory; a number has none."""
        return self.type.nbytes() if isinstance(self.type, TensorType) else 0

    @property
    def tensor(self) -> TensorType:
        assert isinstance(self.type, TensorType), f"{self.name} is a {self.type}, not a tensor"
        return self.type


def short_path(file: str) -> str:
    """Of a library, from its package on; otherwise relative to the current folder where the file stands in it."""
    _, library, inside = file.rpartition("site-packages/")
    return inside if library else file.removeprefix(os.getcwd() + os.sep)


@dataclass(frozen=True)
class Source:
    """Where an equation came from: the user's line and the module that ran it."""

    file: str = ""
    line: int = 0
    module: str = ""
    note: str = ""  # "backward of …", "recompute", …

    def __str__(self) -> str:
        place = f"{short_path(self.file)}:{self.line}" if self.file else ""
        text = " ".join(filter(None, (place, self.module, self.note)))
        # It stands in comments of programs that are run: a line that ended in it would begin code.
        return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


NOWHERE = Source()
NO_GRAD = "no_grad"  # tag of equations that ran under torch.no_grad
NO_TANGENT = "no_tangent"  # tag of equations that ran while forward-mode AD was switched off
VIEWED = "viewed"  # tag of writes through a view that leave nothing of what was there
APART = "apart"  # tag of equations that run, though an equal one gave the caller what they compute


def recompute_tag(region: object) -> str:
    """The tag of equations that backward runs again instead of saving what they give; what leaves one region for
    another may be saved."""
    return f"recompute {region}"


def recompute_region(tags: frozenset[str]) -> str | None:
    """The region that backward runs again, of an equation with these tags."""
    return next((tag.removeprefix("recompute ") for tag in tags if tag.startswith("recompute ")), None)


def without_recompute(tags: frozenset[str]) -> frozenset[str]:
    return frozenset(tag for tag in tags if not tag.startswith("recompute ")) if tags else tags


SPECIALS: dict[str, Special] = {}  # Tessera's own operators, by the name a printed program calls them


@dataclass(frozen=True)
class Recipe:
    """How an executor made a callable of a region, so that it can be made again."""

    body: Any  # the Trace that was compiled, with all its results
    parts: tuple[Any, ...] = ()  # the regions of a launch that runs several, each as a Trace
    over: tuple[tuple[int, int], ...] = ()  # results that are written over arguments and not given back


@dataclass(frozen=True, eq=False)
class Special:
    """An operator that is not PyTorch's: control flow over sub-traces, or an executor's own callable.

    `fn` runs it on tensors, with sub-traces handed over as callables. An executor's callable remembers what it
    stands for: `of`, the operator it runs, or `body`, the region of equations it was compiled from, and how: `recipe`.
    What else can be asked about a region's callable stands in `kernel`.
    """

    name: str
    fn: Callable
    namespace: str = "tessera"
    pure: bool = True
    of: OpOverload | None = None
    body: Any = None  # a Trace
    recipe: Recipe | None = None
    kernel: Kernel | None = None

    def __post_init__(self) -> None:
        if self.namespace == "tessera":
            SPECIALS.setdefault(self.name, self)

    def __repr__(self) -> str:
        return f"{self.namespace}.{self.name}"


Operator = OpOverload | Special
NUMBER = Special("number", lambda n: n)  # a symbolic number as a value


@dataclass(frozen=True, eq=False, slots=True)
class Equation:
    op: Operator
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg]
    outputs: tuple[Value | None, ...]
    many: bool = False  # the operator gives a sequence, even where it has one member
    source: Source = NOWHERE
    tags: frozenset[str] = frozenset()
    _reads: tuple[Value, ...] | None = field(default=None, init=False, repr=False)  # `inputs`, once they were asked for
    _effect: bool | None = field(default=None, init=False, repr=False)  # `has_effect`, once it was asked for
    _signature: int | None = field(default=None, init=False, repr=False)  # `signature.of`, once it was asked for

    @property
    def out(self) -> Value:
        assert len(self.outputs) == 1 and self.outputs[0] is not None
        return self.outputs[0]

    @property
    def opname(self) -> str:
        """The short name of PyTorch's operator; empty where it is a Special."""
        return aten_name(self.op)

    def inputs(self) -> list[Value]:
        """Values this equation reads, in order, with repeats; those its sub-traces capture are arguments too."""
        if self._reads is None:
            object.__setattr__(self, "_reads", tuple(values_in((self.args, self.kwargs))))
        return list(self._reads)  # type: ignore[arg-type]

    def bound(self) -> tuple[list[Any], dict[str, Any]]:
        """All arguments in the order of the schema, defaults filled in: positional and keyword-only. Those of a Special
        as they are."""
        if isinstance(self.op, Special):
            return list(self.args), self.kwargs
        return bind(self.op, self.args, self.kwargs)

    def results(self) -> list[Value]:
        return [v for v in self.outputs if v is not None] if None in self.outputs else list(self.outputs)  # type: ignore[arg-type]

    def with_(self, **changes: object) -> Equation:
        return replace(self, **changes)  # type: ignore[arg-type]

    def substitute(self, names: Mapping[Value, Arg]) -> Equation:
        """The same equation reading other values."""
        return self.over(names, self.outputs)

    def renamed(self, names: Mapping[Value, Value]) -> Equation:
        """The same equation reading and giving other values."""
        return self.over(names, tuple(None if v is None else names.get(v, v) for v in self.outputs))

    def over(self, names: Mapping[Value, Arg], outputs: tuple[Value | None, ...]) -> Equation:
        """The same equation reading what `names` has for its values, and giving these. Spelled out: `replace` takes
        several times as long, and passes copy every equation."""
        args, kwargs = substitute(self.args, names), substitute(self.kwargs, names) if self.kwargs else self.kwargs
        return Equation(self.op, args, kwargs, outputs, self.many, self.source, self.tags)


def values_in(tree: Arg) -> list[Value]:
    values: list[Value] = []
    _collect(tree, values)
    return values


def _collect(tree: Arg, values: list[Value]) -> None:
    kind = type(tree)
    if kind is Value:
        values.append(tree)  # type: ignore[arg-type]
    elif isinstance(tree, (list, tuple)):
        for item in tree:  # passes ask this of every equation: do not call for what holds no values
            if type(item) is Value:
                values.append(item)
            elif type(item) not in ATOMS:
                _collect(item, values)
    elif kind is dict:
        for item in tree.values():  # type: ignore[attr-defined]
            _collect(item, values)
    elif kind is slice:
        _collect((tree.start, tree.stop, tree.step), values)  # type: ignore[attr-defined]


# They hold neither values nor symbolic numbers.
ATOMS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


def map_values(tree: Arg, fn: Callable[[Value], Arg]) -> Arg:
    """The same structure with every Value replaced."""
    if isinstance(tree, Value):
        return fn(tree)
    if isinstance(tree, (tuple, list)):
        items = [item if type(item) in ATOMS else map_values(item, fn) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        return {key: map_values(item, fn) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(map_values(tree.start, fn), map_values(tree.stop, fn), map_values(tree.step, fn))
    return tree


def substitute(tree: Arg, names: Mapping[Value, Arg]) -> Any:
    """The same structure with some Values replaced."""
    if type(tree) is tuple:  # an equation's arguments: most are values or hold none
        return tuple([
            names.get(item, item) if type(item) is Value else item if type(item) in ATOMS else substitute(item, names)
            for item in tree
        ])  # fmt: skip
    return map_values(tree, lambda v: names.get(v, v))


def symbols_in(tree: Arg) -> set[str]:
    """Names of the symbolic sizes that a structure of arguments mentions."""
    symbols: set[str] = set()
    _mention(tree, symbols)
    return symbols


def _mention(tree: Arg, symbols: set[str]) -> None:
    if isinstance(tree, (list, tuple)):
        for item in tree:
            if type(item) is not Value and type(item) not in ATOMS:
                _mention(item, symbols)
    elif isinstance(tree, dict):
        _mention(tuple(tree.values()), symbols)
    elif isinstance(tree, slice):
        _mention((tree.start, tree.stop, tree.step), symbols)
    elif isinstance(tree, SYMBOLIC):
        symbols.update(str(symbol) for symbol in tree.node.expr.free_symbols)
    elif isinstance(tree, Formula):
        symbols.update(tree.names)
