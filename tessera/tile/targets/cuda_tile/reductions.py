"""Reductions and scans in cuTile's words: identities, how two parts are combined, how one tile is reduced."""

from __future__ import annotations

import math

import torch
from xdsl.dialects.builtin import AnyFloat, IntegerType
from xdsl.ir import Attribute

from tessera.tile.dialect.elements import torch_dtype
from tessera.util.errors import OptionError

I1 = IntegerType(1)


def literal(number: bool | int | float, element: Attribute) -> str:
    if element == I1:
        return str(bool(number))
    if isinstance(element, IntegerType):
        return str(number)
    return repr(float(number)) if math.isfinite(number) else f'float("{number}")'


def identity(kind: str, element: Attribute) -> str:
    """What changes nothing when it is combined with; for argmax and argmin, what never wins."""
    kind = kind.removeprefix("arg")
    if kind in ("sum", "any"):
        return "False" if element == I1 else "0"
    if kind in ("prod", "all"):
        return "True" if element == I1 else "1"
    low = kind == "max"
    if element == I1:
        return str(not low)
    if isinstance(element, AnyFloat):
        return 'float("-inf")' if low else 'float("inf")'
    bounds = torch.iinfo(torch_dtype(element))
    return str(bounds.min if low else bounds.max)


def _nan(element: Attribute) -> str:
    return ", propagate_nan=True" if isinstance(element, AnyFloat) else ""


def combine_text(kind: str, element: Attribute) -> str:
    """Two parts into one, elementwise."""
    if element == I1:
        template = {"any": "{0} | {1}", "max": "{0} | {1}", "all": "{0} & {1}", "min": "{0} & {1}"}.get(kind)
    else:
        template = {
            "sum": "{0} + {1}",
            "prod": "{0} * {1}",
            "max": f"ct.maximum({{0}}, {{1}}{_nan(element)})",
            "min": f"ct.minimum({{0}}, {{1}}{_nan(element)})",
        }.get(kind)
    if template is None:
        raise OptionError(f"the CUDA Tile target has no {kind!r} of {element}")
    return template


def whole_text(kind: str, element: Attribute) -> str:
    """A tile reduced along one of its dimensions."""
    if element == I1:
        verb = {"any": "max", "max": "max", "all": "min", "min": "min"}.get(kind)
        if verb is None:
            raise OptionError(f"the CUDA Tile target has no {kind!r} of {element}")
        return f"(ct.{verb}(ct.astype({{0}}, ct.int32), {{1}}) != 0)"
    if kind in ("sum", "prod"):
        return f"ct.{kind}({{0}}, {{1}})"
    return f"ct.{kind}({{0}}, {{1}}{_nan(element)})"
