"""The text of reductions and scans: what they start from, how a block is added, and how a block becomes one element.

A reduction over a loop keeps a whole block of partial results, combined elementwise, and reduces it once at the end.
`argmax` and `argmin` keep a second block with the places of the values. A scan over a loop carries its last element.
"""

from __future__ import annotations

from xdsl.dialects.builtin import AnyFloat, Float32Type, IntegerType, Signedness
from xdsl.ir import Attribute

from tessera.tile.targets.triton.functions import type_name

_COMBINE = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "_maximum({0}, {1})",
    "min": "_minimum({0}, {1})",
    "any": "{0} | ({1})",
    "all": "{0} & ({1})",
}
_FUNCTION = {"prod": "_product", "max": "_maximum", "min": "_minimum", "argmax": "_argmax", "argmin": "_argmin"}
_LAST_PLACE = {False: 2**31 - 1, True: 2**63 - 1}


def identity(kind: str, element: Attribute) -> str:
    """What changes nothing when it is combined with."""
    number = _identity_number(kind, element)
    return number if isinstance(element, Float32Type) else f"tl.full((), {number}, {type_name(element)})"


def _identity_number(kind: str, element: Attribute) -> str:
    match _plain(kind, element):
        case "sum":
            return "0.0" if isinstance(element, AnyFloat) else "0"
        case "prod":
            return "1.0" if isinstance(element, AnyFloat) else "1"
        case "any":
            return "False"
        case "all":
            return "True"
        case "max" | "argmax":
            return _extreme(element, lowest=True)
        case "min" | "argmin":
            return _extreme(element, lowest=False)
    raise NotImplementedError(f"the Triton target has no reduction {kind!r}")


def _extreme(element: Attribute, lowest: bool) -> str:
    if isinstance(element, AnyFloat):
        return "float('-inf')" if lowest else "float('inf')"
    assert isinstance(element, IntegerType)
    bits = element.width.data
    if bits == 1:
        return "False" if lowest else "True"
    if element.signedness.data == Signedness.UNSIGNED:
        return "0" if lowest else str(2**bits - 1)
    return str(-(2 ** (bits - 1))) if lowest else str(2 ** (bits - 1) - 1)


def _plain(kind: str, element: Attribute) -> str:
    """Of truth values, the largest is any and the smallest is all."""
    if isinstance(element, IntegerType) and element.width.data == 1:
        return {"max": "any", "min": "all", "prod": "all"}.get(kind, kind)
    return kind


def start_text(kind: str, element: Attribute, name: str, where: str, shape: str, wide: bool) -> list[str]:
    """The lines before a loop."""
    lines = [f"{name} = tl.full({shape}, {_identity_number(kind, element)}, {type_name(element)})"]
    if where:
        lines.append(f"{where} = tl.full({shape}, {_LAST_PLACE[wide]}, {'tl.int64' if wide else 'tl.int32'})")
    return lines


def accumulate(kind: str, element: Attribute, name: str, where: str, text: str, place: str) -> str:
    """The line inside a loop."""
    if where:
        return f"{name}, {where} = _{kind}({name}, {where}, {text}, {place})"
    return f"{name} = {_COMBINE[_plain(kind, element)].format(name, text)}"


def reduce_text(kind: str, element: Attribute, text: str, place: str, axis: int, rank: int) -> str:
    """A block reduced along one of its dimensions, which stays with length one unless it was the only one."""
    keep = f", axis={axis}" + (", keep_dims=True" if rank > 1 else "")
    kind = _plain(kind, element)
    match kind:
        case "sum":
            small = isinstance(element, IntegerType) and element.width.data < 32
            return f"tl.sum({text}{keep})" + (f".to({type_name(element)})" if small else "")
        case "any":
            return f"tl.max(({text}).to(tl.int32){keep}) != 0"
        case "all":
            return f"tl.min(({text}).to(tl.int32){keep}) != 0"
        case "argmax" | "argmin":
            tail = ", keep_dims=True" if rank > 1 else ""
            return f"tl.reduce(({text}, {place}), {axis}, {_FUNCTION[kind]}{tail})[1].to(tl.int64)"
    tail = ", keep_dims=True" if rank > 1 else ""
    return f"tl.reduce({text}, {axis}, {_FUNCTION[kind]}{tail})"


def scan_lines(
    kind: str, element: Attribute, text: str, carry: str, axis: int, rank: int, carry_shape: str
) -> tuple[list[str], str, list[str]]:
    """Lines before the loop, the running combination of one block, and lines after it inside the loop."""
    own = {"sum": "tl.cumsum({0}, axis={1})", "prod": "tl.cumprod({0}, axis={1})"}
    running = own.get(kind, "tl.associative_scan({0}, {1}, " + _FUNCTION.get(kind, "") + ")").format(text, axis)
    if not carry:
        return [], running, []
    shape = carry_shape if rank > 1 else "()"
    start = f"{carry} = tl.full({shape}, {_identity_number(kind, element)}, {type_name(element)})"
    total = reduce_text(kind, element, text, "", axis, rank)
    return [start], _COMBINE[kind].format(carry, running), [f"{carry} = {_COMBINE[kind].format(carry, total)}"]
