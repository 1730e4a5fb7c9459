"""Attributes of MLIR as Python values. In: an attribute of the bindings. Out: numbers, strings, lists, dicts, tensors.

Attributes that the bindings have no accessors for are read from their text, which is short:
`#stablehlo<fft_type FFT>` is "FFT", `#stablehlo.gather<offset_dims = [1], index_vector_dim = 1>` is a dict, and
`#stablehlo.conv<[b, 0, f]x[0, i, o]->[b, 0, f]>` a list of three lists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tessera.frontends.stablehlo import limits
from tessera.frontends.stablehlo.bindings import bindings
from tessera.frontends.stablehlo.elements import Element
from tessera.frontends.stablehlo.narrow import from_bits
from tessera.util.errors import InputError

_ENUM = re.compile(r"#\w+<[\w.]+ ([\w.]+)>$")
_STRUCT = re.compile(r"#[\w.]+<(.*)>$", re.DOTALL)
_TOKEN = re.compile(r"\s*(->|x(?=\[)|[\w.+-]+|[\[\](){}<>=,:#\"@?!]|.)", re.DOTALL)


def value_of(attribute: Any) -> object:
    """An attribute as a Python value; a dialect's own attribute that is no enumeration, struct or list stays text."""
    ir = bindings().ir
    match attribute:
        case ir.BoolAttr() | ir.IntegerAttr() | ir.FloatAttr() | ir.StringAttr():
            return attribute.value
        case ir.ArrayAttr():
            return [value_of(a) for a in attribute]
        case ir.DictAttr():
            return {a.name: value_of(a.attr) for a in attribute}
        case ir.FlatSymbolRefAttr():
            return attribute.value
        case ir.UnitAttr():
            return True
        case ir.DenseElementsAttr():
            if len(attribute) > limits.ATTRIBUTE:  # one number may stand for all of them
                raise InputError(f"an attribute of {len(attribute)} elements; at most {limits.ATTRIBUTE} are read")
            return np.array(attribute).tolist()
        case ir.DenseI64ArrayAttr() | ir.DenseI32ArrayAttr() | ir.DenseBoolArrayAttr():
            return list(attribute)
    text = str(attribute)
    if enumeration := _ENUM.match(text):
        return enumeration[1]
    if struct := _STRUCT.match(text):
        return _struct(struct[1])
    return text


def _struct(text: str) -> object:
    tokens = [t for t in _TOKEN.findall(text) if t.strip()]
    if tokens[:1] == ["["]:  # [b, 0, f]x[0, i, o]->[b, 0, f]
        rest = iter(tokens)
        return [_list(rest) for t in rest if t == "["]
    fields: dict[str, object] = {}
    rest = iter(tokens)
    for token in rest:
        if token == ",":
            continue
        if next(rest, None) != "=":
            return text
        first = next(rest, "")
        fields[token] = _list(rest) if first == "[" else _atom(first)
    return fields


def _list(tokens: Iterator[str]) -> list:
    items: list[object] = []
    for token in tokens:
        if token == "]":
            return items
        if token == "[":
            items.append(_list(tokens))
        elif token != ",":
            items.append(_atom(token))
    raise InputError("an attribute's list does not end")


def _atom(token: str) -> object:
    return int(token) if re.fullmatch(r"-?\d+", token) else token


# --- constants ---


def constant(operation: Any, shape: tuple[int, ...], element: Element) -> torch.Tensor:
    """The tensor of a `constant`, as programs hold it. One number that stands for all is expanded, not copied."""
    if (array := _as_array(operation, shape, element)) is None:
        return from_text(operation.get_asm(), shape, element)
    scalar = array.size and all(stride == 0 or n == 1 for stride, n in zip(array.strides, array.shape, strict=True))
    if scalar:
        array = array.reshape(-1)[:1] if array.ndim else array
    # A copy: the memory is the module's. NumPy has two types of 64 bits, of which torch knows one.
    own = np.array(array).view(np.dtype(_NUMPY[element.name]))
    tensor = element.enter(torch.from_numpy(own))
    return tensor.reshape(()).expand(shape) if scalar else tensor.reshape(shape)


def _as_array(operation: Any, shape: tuple[int, ...], element: Element) -> np.ndarray | None:
    """The elements where the bindings give them, or None."""
    if element.name not in _NUMPY:
        return None
    attribute = operation.attributes["value"]
    if getattr(attribute, "is_splat", False):
        return np.broadcast_to(np.array(attribute.get_splat_value().value, _NUMPY[element.name]), shape)
    return np.array(attribute, copy=False).reshape(shape)


_NUMPY = {
    "i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "ui8": np.uint8,
    "ui16": np.uint16, "ui32": np.uint32, "ui64": np.uint64, "f16": np.float16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
_DENSE = re.compile(r"dense<(.*)> : tensor", re.DOTALL)
_NUMBER = re.compile(r"true|false|0x[0-9A-Fa-f]+|[-+]?\d[\d.]*(?:[eE][-+]?\d+)?")


def from_text(text: str, shape: tuple[int, ...], element: Element) -> torch.Tensor:
    """The elements as MLIR prints them: few as numbers, many as the hexadecimal digits of their bytes."""
    dense = _DENSE.search(text)
    if dense is None:
        raise InputError(f"expected a dense constant, got {text[:100]}")
    body = dense[1]
    if body.startswith('"0x'):
        tensor = _from_bytes(bytes.fromhex(body[3:-1]), element)
    else:
        numbers = [_number(n, element) for n in _NUMBER.findall(body)]
        if element.kind == "complex":
            numbers = [complex(a, b) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
        tensor = torch.tensor(numbers, dtype=element.held)
    count = math.prod(shape)
    if tensor.numel() == 1 and count != 1:
        return tensor.reshape(()).expand(shape)
    return tensor.reshape(shape)


def _number(text: str, element: Element) -> float | int:
    """One number; hexadecimal digits are a float's bits."""
    if element.integer:
        return int(text, 0)
    if not text.startswith("0x"):
        return float(text)
    bits = int(text, 16)
    if element.format is not None:
        return float(from_bits(torch.tensor(bits), element.format))
    width = element.bits // 2 if element.kind == "complex" else element.bits
    if element.name == "bf16":
        bits, width = bits << 16, 32
    return float(np.array(bits, f"u{width // 8}").view(f"f{width // 8}"))


def _from_bytes(data: bytes, element: Element) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if element.format is not None:
        return from_bits(raw.long(), element.format)
    if element.integer:  # two and four bits, each in a byte of its own
        return element.wrap(raw.view(element.held))
    return raw.view(element.held)
