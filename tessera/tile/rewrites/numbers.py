"""Constants of the tile dialect as Python numbers, and numbers as constants."""

from __future__ import annotations

import math

from xdsl.dialects.builtin import FloatAttr, IntegerAttr, IntegerType
from xdsl.ir import Attribute, Operation, SSAValue

from tessera.tile.dialect.ops import ConstantOp
from tessera.tile.dialect.types import value_type

Number = bool | int | float


def number_of(v: SSAValue) -> Number | None:
    """The number a value is, if it is a constant. A float keeps its type: 1.0 is not 1."""
    op = v.owner
    if not isinstance(op, ConstantOp):
        return None
    assert isinstance(op.value, (IntegerAttr, FloatAttr))
    number = op.value.value.data
    return bool(number) if op.value.type == IntegerType(1) else number


def is_number(v: SSAValue, wanted: Number) -> bool:
    """v is the constant `wanted`, of either kind; zeros are told apart by their sign."""
    number = number_of(v)
    return number is not None and number == wanted and math.copysign(1, number) == math.copysign(1, wanted)


def is_constant(v: SSAValue) -> bool:
    return isinstance(v.owner, ConstantOp)


def constant_op(number: Number, element: Attribute) -> Operation:
    if isinstance(element, IntegerType):
        attr: Attribute = IntegerAttr(int(number), element, truncate_bits=True)
    else:
        attr = FloatAttr(float(number), element)  # type: ignore[arg-type]
    return ConstantOp(properties={"value": attr}, result_types=[value_type(element, ())])
