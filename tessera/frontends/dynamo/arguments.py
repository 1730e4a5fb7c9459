"""What a block is called with, while Dynamo traces: which tensors, where, and the constants beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tessera.torch_internals import tracing
from tessera.torch_internals.tracing import Tx, Variable


@dataclass(frozen=True)
class Slot:
    """One of the nodes."""

    place: int


@dataclass(frozen=True)
class Constant:
    """Equal where Python writes the same: -0.0 is not 0.0, 1 is not True."""

    text: str
    value: object = field(compare=False)


Template = Slot | Constant | tuple


@dataclass(frozen=True)
class Arguments:
    nodes: list[torch.fx.Node]  # tensors and symbolic numbers, each once
    kinds: list[object]  # of each, when the block was called
    args: tuple[Template, ...]
    kwargs: dict[str, Template]

    def difference(self, other: Arguments) -> str:
        """In what a call with these is another one than a call with `other`; empty where it is not."""
        if (self.args, self.kwargs) != (other.args, other.kwargs):
            return "its arguments are other constants, or other tensors are the same"
        for mine, theirs in zip(self.kinds, other.kinds, strict=True):
            if mine != theirs:
                return f"it is given {_told(mine, theirs)}, not {_told(theirs, mine)}"
        return ""


def arguments_of(tx: Tx, args: Sequence[Variable], kwargs: dict[str, Variable]) -> Arguments | None:
    """None where something is neither a tensor, a number, a constant nor a tuple of these, or is a tensor that the
    program has set attributes of."""
    places: dict[torch.fx.Node, int] = {}

    def template(value: Variable) -> Template:
        value = tracing.realized(value)
        if tracing.has_new_attributes(tx, value):
            raise _Other
        if (node := tracing.node_of(value)) is not None:
            return Slot(places.setdefault(node, len(places)))
        if (items := tracing.items_of(value)) is not None:
            return tuple(map(template, items))
        is_constant, constant = tracing.constant_of(value)
        if not is_constant:
            raise _Other
        return Constant(f"{type(constant).__name__} {constant!r}", constant)

    try:
        by_place, by_name = tuple(map(template, args)), {k: template(v) for k, v in kwargs.items()}
    except _Other:
        return None
    return Arguments(list(places), [kind_of(example(n)) for n in places], by_place, by_name)


class _Other(Exception):
    """An argument that is no template."""


def kind_of(x: object) -> object:
    """What a program depends on of a tensor or number, besides its contents. Symbolic sizes are equal by name."""
    if not isinstance(x, torch.Tensor):
        return str(x)
    strides = tuple(map(str, x.stride())) if x.layout is torch.strided else ()
    sizes = tuple(map(str, x.shape))
    return type(x), sizes, strides, x.dtype, x.device, x.layout, x.requires_grad, x.is_leaf, x.is_inference()


def given(node: torch.fx.Node) -> object:
    """The tensor that an input of the program was traced with."""
    return getattr(node.meta.get("grapharg"), "example", None)


def example(node: torch.fx.Node) -> object:
    """The fake tensor, or the number, that Dynamo has for a node."""
    return node.meta.get("example_value")


_KIND = (
    "a",
    "the shape",
    "the strides",
    "the dtype",
    "the device",
    "the layout",
    "requires_grad",
    "is_leaf",
    "inference",
)


def _told(mine: object, other: object) -> str:
    """That in which the one kind is another than the other."""
    if not isinstance(mine, tuple) or not isinstance(other, tuple):
        return "a tensor" if isinstance(mine, tuple) else f"the number {mine}"
    at = next(i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b)
    return f"a tensor with {_KIND[at]} {mine[at]}"


def filled(arguments: Arguments, operands: Sequence[object]) -> tuple[tuple, dict[str, object]]:
    """The arguments themselves; `operands` begins with what the nodes gave."""

    def fill(template: Template) -> object:
        match template:
            case Slot(place):
                return operands[place]
            case Constant(_, value):
                return value
        return tuple(map(fill, template))

    return tuple(map(fill, arguments.args)), {k: fill(v) for k, v in arguments.kwargs.items()}
