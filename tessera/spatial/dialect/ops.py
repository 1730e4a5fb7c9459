"""The dialect `spatial`: tiles as values.

A tile is a matrix on a core; its type says both: `!spatial.tile<"float32[16, 32]", "0,1">`. An operand is a part of a
tile: `parts` has one text for each, `[0:16, 8:32]`, with `^T` where it is read turned. Operations say what is
computed and where, never when. All but `assemble` read the core that they write.
"""

from __future__ import annotations

import re

from xdsl.dialects.builtin import ArrayAttr, IntegerAttr, StringAttr
from xdsl.ir import Dialect, Operation, ParametrizedAttribute, SSAValue, TypeAttribute
from xdsl.irdl import (
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    param_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import IsolatedFromAbove, NoTerminator
from xdsl.utils.exceptions import VerifyException

from tessera.spatial.listing.expression import Unread, read_tree

_TYPE = re.compile(r"([a-z0-9_]+)\[(\d{1,12}), (\d{1,12})\]")
_PART = re.compile(r"\[(\d{1,12}):(\d{1,12}), (\d{1,12}):(\d{1,12})\](\^T)?")
_PLACE = re.compile(r"(\d{1,12}), (\d{1,12})")


@irdl_attr_definition
class TileType(ParametrizedAttribute, TypeAttribute):
    name = "spatial.tile"
    of: StringAttr = param_def()
    core: StringAttr = param_def()

    @property
    def shape(self) -> tuple[int, int]:
        return self.parsed()[1:]

    def parsed(self) -> tuple[str, int, int]:
        if (match := _TYPE.fullmatch(self.of.data)) is None:
            raise VerifyException(f"expected a type such as float32[16, 32], got {self.of.data!r}")
        return match[1], int(match[2]), int(match[3])


def tile_type(value: SSAValue) -> TileType:
    assert isinstance(value.type, TileType)
    return value.type


def read_part(text: str) -> tuple[tuple[int, int, int, int], bool]:
    """The box of a part and whether it is turned."""
    if (match := _PART.fullmatch(text)) is None:
        raise VerifyException(f"expected a part such as [0:16, 0:32] or [0:16, 0:32]^T, got {text!r}")
    return (int(match[1]), int(match[2]), int(match[3]), int(match[4])), match[5] is not None


def read_place(text: str) -> tuple[int, int]:
    if (match := _PLACE.fullmatch(text)) is None:
        raise VerifyException(f"expected a row and a column such as 0, 16, got {text!r}")
    return int(match[1]), int(match[2])


def part_shapes(op: Operation, operands: list[SSAValue], parts: ArrayAttr[StringAttr]) -> list[tuple[int, int]]:
    """The shapes of an operation's parts, each of which lies within its tile."""
    if len(operands) != len(parts):
        raise VerifyException(f"{op.name}: expected a part for each of {len(operands)} operands, got {len(parts)}")
    shapes = []
    for value, text in zip(operands, parts, strict=True):
        (top, bottom, left, right), turned = read_part(text.data)
        rows, columns = tile_type(value).shape
        if not (0 <= top < bottom <= rows and 0 <= left < right <= columns):
            raise VerifyException(f"{op.name}: {text.data} is no part of {tile_type(value).of.data}")
        shapes.append((right - left, bottom - top) if turned else (bottom - top, right - left))
    return shapes


def check_core(op: Operation, operands: list[SSAValue], result: SSAValue) -> None:
    for value in operands:
        if tile_type(value).core != tile_type(result).core:
            here, there = tile_type(result).core.data, tile_type(value).core.data
            raise VerifyException(f"{op.name}: computed on core {here}, but it reads a tile of core {there}")


class TileOp(IRDLOperation):
    """What gives a tile: its label, the user's line, the matrix that it is a block of, and of several batches which."""

    label = prop_def(StringAttr)
    source = prop_def(StringAttr)
    home = opt_prop_def(StringAttr)
    batch = opt_prop_def(IntegerAttr)
    result = result_def(TileType)


class BlockOp(TileOp):
    """A block of a tensor, as large as the tile."""

    tensor = prop_def(StringAttr)
    box = prop_def(StringAttr)

    def verify_(self) -> None:
        (top, bottom, left, right), _ = read_part(self.box.data)
        if (bottom - top, right - left) != tile_type(self.result).shape:
            raise VerifyException(f"{self.name}: {self.box.data} is not what {tile_type(self.result).of.data} holds")


class PartsOp(TileOp):
    """A tile of parts of others, its operands."""

    operands_ = var_operand_def(TileType)
    parts = prop_def(ArrayAttr[StringAttr])

    def shapes(self, here: bool = True) -> list[tuple[int, int]]:
        """Of the parts; they lie on the tile's own core where they must be `here`."""
        if here:
            check_core(self, list(self.operands), self.result)
        return part_shapes(self, list(self.operands), self.parts)


@irdl_op_definition
class HoldOp(BlockOp):
    """A block of a tensor that lies in memory before the program begins."""

    name = "spatial.hold"
    kind = prop_def(StringAttr)  # weight, or state, which is written and kept


@irdl_op_definition
class ReceiveOp(BlockOp):
    """A block of an input, from the host."""

    name = "spatial.receive"


@irdl_op_definition
class LoadOp(BlockOp):
    """A block of a tensor in off-chip memory."""

    name = "spatial.load"
    dram = prop_def(StringAttr)  # its name there


@irdl_op_definition
class AssembleOp(PartsOp):
    """Parts of tiles of any cores, each at a row and a column of the new tile."""

    name = "spatial.assemble"
    places = prop_def(ArrayAttr[StringAttr])

    def verify_(self) -> None:
        shapes = self.shapes(here=False)
        if len(self.places) != len(shapes):
            raise VerifyException(f"{self.name}: expected a place for each of {len(shapes)} parts")
        rows, columns = tile_type(self.result).shape
        filled = 0
        for (height, width), text in zip(shapes, self.places, strict=True):
            row, column = read_place(text.data)
            filled += height * width
            if row + height > rows or column + width > columns:
                raise VerifyException(f"{self.name}: a part at {text.data} goes beyond its {rows}×{columns}")
        if filled != rows * columns:
            raise VerifyException(f"{self.name}: parts fill {filled} of {rows * columns} elements")


@irdl_op_definition
class MultiplyOp(PartsOp):
    """The sum of products: operands are x, w, x, w, …."""

    name = "spatial.multiply"

    def verify_(self) -> None:
        shapes = self.shapes()
        if not shapes or len(shapes) % 2:
            raise VerifyException(f"{self.name}: expected pairs of factors, got {len(shapes)} operands")
        for (m, k), (depth, n) in zip(shapes[::2], shapes[1::2], strict=True):
            if k != depth or (m, n) != tile_type(self.result).shape:
                of = tile_type(self.result).of.data
                raise VerifyException(f"{self.name}: {m}×{k} by {depth}×{n} does not give {of}")


@irdl_op_definition
class ComputeOp(PartsOp):
    """An expression over parts, which broadcast: `gelu(_0 + _1)`."""

    name = "spatial.compute"
    expression = prop_def(StringAttr)

    def verify_(self) -> None:
        self.shapes()
        try:
            read_tree(self.expression.data)
        except Unread as error:
            raise VerifyException(f"{self.name}: {error}") from None


@irdl_op_definition
class GatherOp(PartsOp):
    """Rows of a table, the first operand, chosen by the second."""

    name = "spatial.gather"

    def verify_(self) -> None:
        shapes = self.shapes()
        if len(shapes) != 2 or (shapes[1][0], shapes[0][1]) != tile_type(self.result).shape:
            raise VerifyException(f"{self.name}: {shapes} do not give {tile_type(self.result).of.data}")


@irdl_op_definition
class ScatterOp(PartsOp):
    """Rows of a state, the first operand, chosen by the second, are written in place with the third."""

    name = "spatial.scatter"

    def verify_(self) -> None:
        shapes = self.shapes()
        if len(shapes) != 3 or shapes[0] != tile_type(self.result).shape or shapes[1][0] != shapes[2][0]:
            raise VerifyException(f"{self.name}: {shapes} do not give {tile_type(self.result).of.data}")


@irdl_op_definition
class GiveOp(IRDLOperation):
    """A part goes to the host: a block of an output."""

    name = "spatial.give"
    tensor = prop_def(StringAttr)
    box = prop_def(StringAttr)
    value = operand_def(TileType)
    parts = prop_def(ArrayAttr[StringAttr])

    def verify_(self) -> None:
        (top, bottom, left, right), _ = read_part(self.box.data)
        if part_shapes(self, [self.value], self.parts) != [(bottom - top, right - left)]:
            raise VerifyException(f"{self.name}: {self.parts} is not what {self.box.data} takes")


@irdl_op_definition
class ProgramOp(IRDLOperation):
    """All tiles of a program, in an order in which each is filled before it is read."""

    name = "spatial.program"
    label = prop_def(StringAttr)
    inputs = prop_def(ArrayAttr[StringAttr])
    outputs = prop_def(ArrayAttr[StringAttr])
    hosted = opt_prop_def(ArrayAttr[StringAttr])  # tensors that operators at the host read and give
    calls = opt_prop_def(ArrayAttr[StringAttr])  # these operators, each behind the core that asks for it
    body = region_def("single_block")
    traits = traits_def(IsolatedFromAbove(), NoTerminator())


Spatial = Dialect(
    "spatial",
    [ProgramOp, HoldOp, ReceiveOp, LoadOp, AssembleOp, MultiplyOp, ComputeOp, GatherOp, ScatterOp, GiveOp],
    [TileType],
)
