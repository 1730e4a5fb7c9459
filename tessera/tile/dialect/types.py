"""Types of the tile dialect: memory, values over axes, and the attributes that name axes and positions.

A value varies over some of a kernel's axes: `!tile.value<f32, ["i", "r"]>` has one element for every (i, r).
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import ArrayAttr, IntegerType, StringAttr
from xdsl.ir import Attribute, ParametrizedAttribute, SSAValue, TypeAttribute
from xdsl.irdl import irdl_attr_definition, param_def

from tessera.tile.dialect.index import Index, parse

I1, I64 = IntegerType(1), IntegerType(64)


@irdl_attr_definition
class BufferType(ParametrizedAttribute, TypeAttribute):
    """Memory that holds elements of one type; offsets count elements."""

    name = "tile.buffer"
    element: Attribute = param_def()


@irdl_attr_definition
class ValueType(ParametrizedAttribute, TypeAttribute):
    """One element for every point of the axes it varies over, in the kernel's order of axes."""

    name = "tile.value"
    element: Attribute = param_def()
    axes: ArrayAttr[StringAttr] = param_def()

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(a.data for a in self.axes)


@irdl_attr_definition
class IndexAttr(ParametrizedAttribute):
    """An index expression (see `index`), by its text."""

    name = "tile.index"
    text: StringAttr = param_def()

    @property
    def expr(self) -> Index:
        return parse(self.text.data)


def index_attr(expr: Index | int) -> IndexAttr:
    return IndexAttr(StringAttr(str(Index.of(expr))))


@irdl_attr_definition
class AxisAttr(ParametrizedAttribute):
    """An axis: its name, whether it is parallel or reduced, its size as an expression of the kernel's symbols."""

    name = "tile.axis"
    axis: StringAttr = param_def()
    kind: StringAttr = param_def()
    size: IndexAttr = param_def()


def value_type(element: Attribute, axes: Sequence[str]) -> ValueType:
    return ValueType(element, ArrayAttr([StringAttr(a) for a in axes]))


def axes_of(v: SSAValue) -> tuple[str, ...]:
    assert isinstance(v.type, ValueType)
    return v.type.axis_names


def element_of(v: SSAValue) -> Attribute:
    assert isinstance(v.type, (ValueType, BufferType))
    return v.type.element
