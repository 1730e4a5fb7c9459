"""Numbers and conversions in the text: literals that keep their type, casts that round as PyTorch's do."""

from __future__ import annotations

import numpy
from xdsl.dialects.builtin import (
    AnyFloat,
    Float8E5M2Type,
    Float32Type,
    Float64Type,
    FloatAttr,
    IntegerAttr,
    IntegerType,
)
from xdsl.ir import Attribute

from tessera.tile.targets.triton.functions import type_name
from tessera.util.names import names

# Functions of integers that keep the type of the tensor beside a number.
PLAIN_INTEGER = names("add sub mul eq ne lt le gt ge bit_and bit_or bit_xor shl shr")


def is_truth(element: Attribute) -> bool:
    return isinstance(element, IntegerType) and element.width.data == 1


def zero(element: Attribute) -> str:
    return "0.0" if isinstance(element, AnyFloat) else "0"


def number(attribute: Attribute) -> str:
    assert isinstance(attribute, (IntegerAttr, FloatAttr))
    value = attribute.value.data
    if isinstance(attribute, IntegerAttr):
        return str(bool(value)) if is_truth(attribute.type) else str(value)
    if value != value or value in (float("inf"), float("-inf")):
        return f"float('{value}')"
    return repr(float(value)) if not isinstance(attribute.type, Float32Type) else str(numpy.float32(value))


def cast(text: str, source: Attribute, target: Attribute) -> str:
    """As PyTorch converts: narrow floats by way of f32, truth is "not zero"."""
    if source == target:
        return text
    if is_truth(target):
        return f"{text} != 0"
    if isinstance(target, Float8E5M2Type):
        return f"_e5m2({text if isinstance(source, Float32Type) else f'{text}.to(tl.float32)'})"
    if _narrow(target) and not isinstance(source, Float32Type):
        return f"{text}.to(tl.float32).to({type_name(target)})"
    if _narrow(source) and not isinstance(target, (Float32Type, Float64Type)):
        text = f"{text}.to(tl.float32)"
    if isinstance(source, AnyFloat) and isinstance(target, IntegerType) and target.width.data < 32:
        text = f"{text}.to(tl.int64)"  # then the low bits, as the CPU does
    return f"{text}.to({type_name(target)})"


def _narrow(element: Attribute) -> bool:
    return isinstance(element, AnyFloat) and element.bitwidth <= 16
