"""A StableHLO program as plain data: functions, blocks, operations, types. `parse` makes it, `run` gives it a meaning.

Nothing here refers to MLIR: attributes are Python values, sizes that are not known are None, and values are numbers
that are unique in their function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tessera.frontends.stablehlo.elements import Element


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int | None, ...]
    element: Element

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def static(self) -> bool:
        return None not in self.shape

    def __str__(self) -> str:
        sizes = "".join("?x" if n is None else f"{n}x" for n in self.shape)
        return f"tensor<{sizes}{self.element.name}>"


@dataclass(frozen=True)
class Tuple:
    types: tuple[Type, ...]


@dataclass(frozen=True)
class Token:
    pass


Type = Tensor | Tuple | Token


@dataclass(frozen=True)
class Block:
    """Arguments, operations, and the values that the last one (`return`) gives."""

    arguments: tuple[int, ...]
    types: tuple[Type, ...]
    operations: tuple[Operation, ...]
    returns: tuple[int, ...]

    @cached_property
    def last_uses(self) -> dict[int, list[int]]:
        """The values whose last use, here or in a region, is the operation at a place."""
        last: dict[int, int] = {}
        for place, operation in enumerate(self.operations):
            for i in (*operation.results, *operation.reads):
                last[i] = place
        ends: dict[int, list[int]] = {}
        for i, place in last.items():
            if i not in self.returns:
                ends.setdefault(place, []).append(i)
        return ends


@dataclass(frozen=True)
class Operation:
    name: str  # with its dialect: stablehlo.add
    operands: tuple[int, ...]
    results: tuple[int, ...]
    operand_types: tuple[Type, ...]
    result_types: tuple[Type, ...]
    attributes: Mapping[str, object]
    regions: tuple[Block, ...]
    line: str  # where it stands, for messages

    @cached_property
    def reads(self) -> frozenset[int]:
        """Operands, and what its regions read."""
        inner = (i for region in self.regions for o in region.operations for i in o.reads)
        returned = (i for region in self.regions for i in region.returns)
        return frozenset((*self.operands, *inner, *returned))


@dataclass(frozen=True)
class Function:
    name: str
    body: Block
    results: tuple[Type, ...]


@dataclass(frozen=True)
class Module:
    name: str
    functions: Mapping[str, Function]
    size: int  # bytes of the file
    attributes: Mapping[str, object] = field(default_factory=dict)

    @property
    def main(self) -> Function:
        return self.functions["main"] if "main" in self.functions else next(iter(self.functions.values()))
