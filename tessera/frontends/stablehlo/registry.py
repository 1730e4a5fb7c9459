"""The table of meanings: an operator's name and the function over tensors that computes it.

A function takes the `Site` (the operation's attributes, types and regions) and its operands. Run on real tensors it
is the interpreter; run under the recorder it writes the Trace. `operators/` fills the table, one file a family; users
add targets of `custom_call` with `tessera.stablehlo.register`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from tessera.frontends.stablehlo.elements import Element
from tessera.frontends.stablehlo.module import Block, Operation, Tensor, Type
from tessera.frontends.stablehlo.values import Value
from tessera.util.errors import InputError


class NoMeaningError(InputError):
    """An operation that has no meaning here; the message names it."""


class Machine(Protocol):
    """What runs a program, as operators see it."""

    device: torch.device
    environment: dict[int, Value]

    def block(self, block: Block, arguments: Sequence[Value]) -> tuple[Value, ...]: ...
    def call(self, name: str, arguments: Sequence[Value]) -> tuple[Value, ...]: ...
    def function(self, name: str) -> Block: ...
    def check(self, shape: Sequence[int], element: Element) -> None: ...


@dataclass(frozen=True)
class Site:
    """One operation where it runs."""

    operation: Operation
    machine: Machine

    def __getitem__(self, name: str) -> Any:
        if name not in self.operation.attributes:
            raise InputError(
                f"{self.operation.name} at {self.operation.line}: expected an attribute {name!r}, got none"
            )
        return self.operation.attributes[name]

    def get(self, name: str, default: Any = None) -> Any:
        attribute = self.operation.attributes.get(name)
        return default if attribute is None else attribute

    @property
    def name(self) -> str:
        return self.operation.name.split(".", 1)[1]

    @property
    def device(self) -> torch.device:
        return self.machine.device

    @property
    def result(self) -> Tensor:
        return self.result_at(0)

    def result_at(self, place: int) -> Tensor:
        type_ = self.operation.result_types[place]
        assert isinstance(type_, Tensor)
        return type_

    def operand(self, place: int) -> Tensor:
        type_ = self.operation.operand_types[place]
        assert isinstance(type_, Tensor)
        return type_

    @property
    def element(self) -> Element:
        """Of the first result."""
        return self.result.element

    def body(self, place: int = 0) -> Callable[..., tuple[Value, ...]]:
        """A region as a function over values."""
        block = self.operation.regions[place]
        return lambda *arguments: self.machine.block(block, arguments)

    def region(self, place: int = 0) -> Block:
        return self.operation.regions[place]

    def with_types(self, operands: Sequence[Type], results: Sequence[Type]) -> Site:
        changed = replace(self.operation, operand_types=tuple(operands), result_types=tuple(results))
        return replace(self, operation=changed)


Meaning = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """A meaning and how it takes its operands."""

    run: Meaning
    elementwise: bool = False  # each element of the result is made of the operands' elements at its place
    numbers: bool = False  # a Splat comes as its number where another operand is a tensor
    raw: bool = False  # operands come as they are: tensors, Splats, Sizes
    storage: bool = False  # what it does to quantized numbers, it does to the integers that store them
    folds: bool = True  # may run once, when the program is recorded, where all operands are known


TABLE: dict[str, Row] = {}
CUSTOM_CALLS: dict[str, Meaning] = {}
COMPOSITES: dict[str, Meaning] = {}


def meaning(*names: str, dialect: str = "stablehlo", **how: bool) -> Callable[[Meaning], Meaning]:
    """Enter a function for these operations."""

    def enter(fn: Meaning) -> Meaning:
        for name in names:
            TABLE[f"{dialect}.{name}"] = Row(fn, **how)
        return fn

    return enter


def elementwise(*names: str, dialect: str = "stablehlo", numbers: bool = False, **how: bool) -> Callable:
    return meaning(*names, dialect=dialect, elementwise=True, numbers=numbers, **how)


def custom_call(*targets: str) -> Callable[[Meaning], Meaning]:
    """Enter a function for `custom_call`s of these targets."""

    def enter(fn: Meaning) -> Meaning:
        for target in targets:
            CUSTOM_CALLS[target] = fn
        return fn

    return enter


def composite(*names: str) -> Callable[[Meaning], Meaning]:
    """Enter a function for composites of these names: it may decline by giving NotImplemented."""

    def enter(fn: Meaning) -> Meaning:
        for name in names:
            COMPOSITES[name] = fn
        return fn

    return enter
