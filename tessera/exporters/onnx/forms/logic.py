"""Comparison, logic, and choosing by it."""

from __future__ import annotations

import torch

from tessera.exporters.onnx.forms.common import as_ref, need, promoted
from tessera.exporters.onnx.forms.elementwise import NARROW, convert
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.exporters.onnx.registry import Form, form

_COMPARE = {"eq": "Equal", "lt": "Less", "gt": "Greater", "le": "LessOrEqual", "ge": "GreaterOrEqual"}


def compare(g: Graph, kind: str, a: object, b: object) -> Ref:
    dtype = promoted(a, b)
    need(not dtype.is_complex)
    wide = dtype if dtype.is_floating_point or dtype in (torch.int32, torch.int64) else torch.int32
    if kind == "Equal" and dtype == torch.bool:
        wide = dtype
    return g.op(kind, as_ref(g, a, wide), as_ref(g, b, wide), dtype=torch.bool)


def _compared(kind: str) -> Form:
    return lambda g, a, b: compare(g, kind, a, b)


for _name, _kind in _COMPARE.items():
    form(_name)(_compared(_kind))


@form("ne")
def ne(g: Graph, a: object, b: object) -> Ref:
    return g.op("Not", compare(g, "Equal", a, b))


def _logical(kind: str) -> Form:
    def write(g: Graph, a: Ref, b: Ref) -> Ref:
        need(not a.dtype.is_complex and not b.dtype.is_complex)
        return g.op(kind, convert(g, a, torch.bool), convert(g, b, torch.bool), dtype=torch.bool)

    return write


for _name in ("and", "or", "xor"):
    form(f"logical_{_name}")(_logical(_name.capitalize()))


@form("logical_not")
def logical_not(g: Graph, x: Ref) -> Ref:
    need(not x.dtype.is_complex)
    return g.op("Not", convert(g, x, torch.bool))


def _bitwise(logical: str) -> Form:
    def write(g: Graph, a: object, b: object) -> Ref:
        dtype = g.result.dtype
        x, y = as_ref(g, a, dtype), as_ref(g, b, dtype)
        if dtype == torch.bool or g.opset >= 18:
            return g.op(logical if dtype == torch.bool else f"Bitwise{logical}", x, y, dtype=dtype)
        weights = bit_weights(dtype)
        both = g.op(logical, bits(g, x, weights), bits(g, y, weights), dtype=torch.bool)
        return g.cast(from_bits(g, both, weights), dtype)

    return write


def bit_weights(dtype: torch.dtype) -> torch.Tensor:
    """What the bits of a number stand for, the lowest first; the highest of a signed one for something negative."""
    info = torch.iinfo(dtype)
    weights = [1 << i for i in range(info.bits)]
    return torch.tensor([*weights[:-1], -weights[-1]] if info.min < 0 else weights)


def bits(g: Graph, x: Ref, weights: torch.Tensor) -> Ref:
    """The bits of each number, in a last dimension: before opset 18 there is no operator for them. A number's bit is
    that of the number rounded down to a multiple of what the bit stands for; the sign's, whether it is negative."""
    number = g.unsqueeze(g.cast(x, torch.int64), -1)
    signed = bool(weights[-1] < 0)
    steps = g.tensor(weights[:-1] if signed else weights)
    whole = g.op("Div", g.op("Sub", number, g.op("Mod", number, steps)), steps)
    found = g.cast(g.op("Mod", whole, g.full(2, torch.int64)), torch.bool)
    if not signed:
        return found
    negative = g.op("Less", number, g.full(0, torch.int64), dtype=torch.bool)
    return g.op("Concat", found, negative, axis=-1, dtype=torch.bool, shape=[*x.sizes, len(weights)])


def from_bits(g: Graph, found: Ref, weights: torch.Tensor) -> Ref:
    """The numbers of these bits, in halves: ONNX Runtime adds integers up as floats of 53 bits."""
    half = 32
    if len(weights) > half:
        low, high = (g.slice(found, -1, start, start + half) for start in (0, half))
        upper = g.op("Mul", from_bits(g, high, weights[half:] >> half), g.full(1 << half, torch.int64))
        return g.op("Add", upper, from_bits(g, low, weights[:half]))
    return g.reduce("ReduceSum", g.op("Mul", g.cast(found, torch.int64), g.tensor(weights)), [-1], False)


for _name in ("and", "or", "xor"):
    form(f"bitwise_{_name} __{_name}__")(_bitwise(_name.capitalize()))


@form("bitwise_not")
def bitwise_not(g: Graph, x: Ref) -> Ref:
    if x.dtype == torch.bool or g.opset >= 18:
        return g.op("Not" if x.dtype == torch.bool else "BitwiseNot", x)
    ones = torch.iinfo(x.dtype).max if x.dtype == torch.uint8 else -1
    return g.cast(g.op("Sub", g.full(ones, torch.int64), g.cast(x, torch.int64)), x.dtype)


def _shift(direction: str) -> Form:
    def write(g: Graph, a: object, b: object) -> Ref:
        """ONNX shifts unsigned numbers alone; a signed one is multiplied, or divided as Python does."""
        dtype = g.result.dtype
        need(not dtype.is_floating_point)
        factor = g.cast(g.op("Pow", g.full(2.0, torch.float64), as_ref(g, b, torch.float64)), torch.int64)
        x = as_ref(g, a, torch.int64)
        if direction == "left":
            return g.op("Mul", x, factor)
        return g.op("Div", g.op("Sub", x, g.op("Mod", x, factor)), factor)

    return write


form("bitwise_left_shift __lshift__")(_shift("left"))
form("bitwise_right_shift __rshift__")(_shift("right"))


@form("isnan")
def isnan(g: Graph, x: Ref) -> Ref:
    need(not x.dtype.is_complex)
    return g.op("IsNaN", g.cast(x, x.dtype if x.is_float else torch.float32), dtype=torch.bool)


@form("isinf")
def isinf(g: Graph, x: Ref) -> Ref:
    need(not x.dtype.is_complex)
    return g.op("IsInf", g.cast(x, x.dtype if x.is_float else torch.float32), dtype=torch.bool)


@form("isposinf")
def isposinf(g: Graph, x: Ref) -> Ref:
    return g.op("IsInf", g.cast(x, x.dtype if x.is_float else torch.float32), detect_negative=0, dtype=torch.bool)


@form("isneginf")
def isneginf(g: Graph, x: Ref) -> Ref:
    return g.op("IsInf", g.cast(x, x.dtype if x.is_float else torch.float32), detect_positive=0, dtype=torch.bool)


@form("isfinite")
def isfinite(g: Graph, x: Ref) -> Ref:
    need(not x.dtype.is_complex)
    wide = g.cast(x, x.dtype if x.is_float else torch.float32)
    return g.op("Not", g.op("Or", g.op("IsNaN", wide, dtype=torch.bool), g.op("IsInf", wide, dtype=torch.bool)))


@form("signbit prims.signbit")
def signbit(g: Graph, x: Ref) -> Ref:
    """A negative zero has one, too: it is what its reciprocal says."""
    if not x.is_float:
        return compare(g, "Less", x, 0)
    zero = g.full(0, x.dtype)
    negative = g.op("Less", x, zero, dtype=torch.bool)
    at_zero = g.op("Equal", x, zero, dtype=torch.bool)
    below = g.op("Less", g.op("Reciprocal", x), zero, dtype=torch.bool)
    return g.op("Or", negative, g.op("And", at_zero, below))


# --- choosing ---


@form("where")
def where(g: Graph, test: Ref, a: object = None, b: object = None) -> Ref:
    need(a is not None and not g.result.dtype.is_complex)
    dtype = g.result.dtype
    return g.op("Where", convert(g, test, torch.bool), as_ref(g, a, dtype), as_ref(g, b, dtype), dtype=dtype)


@form("masked_fill")
def masked_fill(g: Graph, x: Ref, mask: Ref, value: object) -> Ref:
    dtype = g.result.dtype
    need(not dtype.is_complex)
    return g.op("Where", mask, as_ref(g, value, dtype), g.cast(x, dtype), dtype=dtype)


@form("clamp clip")
def clamp(g: Graph, x: Ref, low: object = None, high: object = None) -> Ref:
    """Not Clip: where the bounds cross, PyTorch gives the upper one, and bounds may be tensors."""
    dtype = g.result.dtype
    out = g.cast(x, torch.int32 if dtype in NARROW else dtype)
    for kind, bound in (("Max", low), ("Min", high)):
        if dtype == torch.uint8 and isinstance(bound, int):
            bound %= 256  # as PyTorch takes a negative one
        if bound is not None:
            out = g.op(kind, out, as_ref(g, bound, out.dtype))
    return g.cast(out, dtype)


@form("clamp_min")
def clamp_min(g: Graph, x: Ref, low: object) -> Ref:
    return clamp(g, x, low)


@form("clamp_max")
def clamp_max(g: Graph, x: Ref, high: object) -> Ref:
    return clamp(g, x, None, high)
