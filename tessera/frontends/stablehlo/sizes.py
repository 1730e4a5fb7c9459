"""Arithmetic on sizes: the operations that programs of dynamic shapes compute their shapes with, over Python's
integers.

In: `Sizes`, or integers that are known otherwise. Out: `Sizes`. Symbols stay symbols, so a shape is an expression of
the arguments' sizes, and an assertion about sizes is one of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tessera.frontends.stablehlo.registry import Site
from tessera.frontends.stablehlo.values import Later, Sizes, Splat, Value, elements_of, is_fake
from tessera.ir.types import SYMBOLIC
from tessera.torch_internals.shapes import size_functions, torch_check

LARGEST = 64  # elements: a shape has few
PLACES = 8  # elements of a vector that may hold numbers which only a run tells


def one_shape(operands: Sequence[Value]) -> None:
    """Operands of an operation over elements have one shape, but for numbers: torch would repeat a size of one."""
    shapes = [x.shape for x in operands if isinstance(x, (torch.Tensor, Splat)) and len(x.shape)]
    for sizes in zip(*shapes, strict=False):
        one_size(*sizes)


def one_size(*sizes: object) -> None:
    """That one of them is one and another is not, torch does not ask."""
    if any(isinstance(n, int) and n == 1 for n in sizes):
        message = f"expected operands of one shape, got sizes {' and '.join(map(str, sizes))}"
        for n in sizes:
            if isinstance(n, int) and n != 1:
                raise ValueError(message)
            torch_check(n == 1, lambda: message)


def _truncated(a: object, b: object) -> object:
    """Division as StableHLO has it, towards zero."""
    if b == 0:
        return -1
    return a // b if bool(a >= 0) == bool(b > 0) else -(-a // b)  # type: ignore[operator]


def _remainder(a: object, b: object) -> object:
    return a if b == 0 else a - b * _truncated(a, b)  # type: ignore[operator]


def _rounded_down(p: object, a: object, b: object) -> object:
    """`n % d != 0 ? -(n // d) - 1 : -(n // d)`, which is how JAX divides -n by d and rounds down, as one division.
    PyTorch reasons about such a size, not about one of two cases."""
    if not isinstance(b, torch.SymInt) or not isinstance(a, torch.SymInt) or not isinstance(p, SYMBOLIC):
        return None
    condition, quotient = p.node.expr, -b.node.expr
    if not isinstance(quotient, size_functions.FloorDiv) or b.node.expr - a.node.expr != 1:
        return None
    size, divisor = quotient.args
    rest = size - divisor * quotient
    if condition.func.__name__ != "Ne" or condition.args[1] != 0 or condition.args[0] not in (rest, -rest):
        return None
    if not divisor.is_Integer or divisor < 1:
        return None
    numerator = b.node.shape_env.create_symintnode(size, hint=None)
    return -((numerator + int(divisor) - 1) // int(divisor))


def _choose(p: object, a: object, b: object) -> object:
    if not isinstance(p, SYMBOLIC):
        return a if p else b
    if (floor := _rounded_down(p, a, b)) is not None:
        return floor
    if isinstance(a, SYMBOLIC) != isinstance(b, SYMBOLIC):  # torch takes two of one kind
        symbol = a if isinstance(a, SYMBOLIC) else b
        a, b = a + (symbol - symbol), b + (symbol - symbol)  # type: ignore[operator]
    return torch.sym_ite(p, a, b)  # type: ignore[arg-type]


def _between(low: object, x: object, high: object) -> object:
    return torch.sym_min(torch.sym_max(x, low), high)  # type: ignore[arg-type]


def _sign(a: object) -> int:
    return 1 if a > 0 else -1 if a < 0 else 0  # type: ignore[operator]


def _is_symbol(a: object, b: object) -> bool:
    return isinstance(a, SYMBOLIC) or isinstance(b, SYMBOLIC)


def _and(a: object, b: object) -> object:
    return a & b if _is_symbol(a, b) else bool(a) and bool(b)  # type: ignore[operator]


def _or(a: object, b: object) -> object:
    return a | b if _is_symbol(a, b) else bool(a) or bool(b)  # type: ignore[operator]


def _not(a: object) -> object:
    return torch.sym_not(a) if isinstance(a, SYMBOLIC) else not a  # type: ignore[arg-type]


_POINTWISE: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": _truncated,
    "remainder": _remainder,
    "maximum": torch.sym_max,
    "minimum": torch.sym_min,
    "negate": lambda a: -a,
    "abs": abs,
    "sign": _sign,
    "select": _choose,
    "clamp": lambda low, x, high: x.clamp(low, high) if isinstance(x, Later) else _between(low, x, high),
}
_BOOLEAN: dict[str, Callable] = {
    "and": _and,
    "or": _or,
    "not": _not,
}
_COMPARE: dict[str, Callable] = {
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
}
# Of truth values, which sizes' expressions cannot compare; false is less than true.
_COMPARE_BOOLEAN: dict[str, Callable] = {
    "EQ": lambda a, b: _or(_and(a, b), _and(_not(a), _not(b))),
    "NE": lambda a, b: _or(_and(a, _not(b)), _and(_not(a), b)),
    "LT": lambda a, b: _and(_not(a), b),
    "LE": lambda a, b: _or(_not(a), b),
    "GT": lambda a, b: _and(a, _not(b)),
    "GE": lambda a, b: _or(a, _not(b)),
}


def _apply(fn: Callable, *arrays: np.ndarray) -> np.ndarray:
    """Element by element, over objects; NumPy alone would turn what it knows into its own numbers."""
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    out = np.empty(shape, object)
    broadcast = [np.broadcast_to(a, shape) for a in arrays]
    for place in np.ndindex(*shape):
        out[place] = fn(*(a[place] for a in broadcast))
    return out


def _shaped(site: Site, x: np.ndarray) -> np.ndarray:
    return x.reshape(site.result.shape)  # type: ignore[arg-type]


def _slice(site: Site, x: np.ndarray) -> np.ndarray:
    places = zip(site["start_indices"], site["limit_indices"], site["strides"], strict=True)
    return x[tuple(slice(a, b, c) for a, b, c in places)]


def _broadcast(site: Site, x: np.ndarray) -> np.ndarray:
    shape = [1] * site.result.rank
    for place, n in zip(site["broadcast_dimensions"], x.shape, strict=True):
        shape[place] = n
    return np.broadcast_to(x.reshape(shape), site.result.shape)  # type: ignore[arg-type]


_STRUCTURAL: dict[str, Callable] = {
    "reshape": _shaped,
    "slice": _slice,
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda site, *xs: np.concatenate(xs, site["dimension"]),
}


def _joined(site: Site, operands: tuple[Value, ...]) -> Sizes | None:
    """A vector of few integers of which some are known and others only a run tells: where a slice begins."""
    if not site.element.integer or site.result.rank != 1 or (site.result.shape[0] or LARGEST) > PLACES:
        return None
    if not any(map(is_fake, operands)) or all(map(is_fake, operands)):
        return None
    parts = []
    for x in operands:
        if isinstance(x, torch.Tensor) and is_fake(x):
            part = np.empty(x.shape[0], object)
            for i in range(x.shape[0]):
                part[i] = Later(x[i])
        else:
            part = elements_of(x)
        parts.append(part)
    return Sizes(np.concatenate(parts), site.element)


def sizes_meaning(site: Site, operands: tuple[Value, ...]) -> Sizes | None:
    """What the operation gives, if it computes with sizes alone; None if it does not."""
    name = site.name
    if name == "concatenate" and (joined := _joined(site, operands)) is not None:
        return joined
    if not any(isinstance(x, Sizes) for x in operands) or len(site.operation.results) != 1:
        return None
    rule = _POINTWISE.get(name) or (_BOOLEAN.get(name) if site.element.kind == "bool" else None)
    known = name in _STRUCTURAL or name in ("compare", "convert")
    if (rule is None and not known) or not (site.element.integer or site.element.kind == "bool"):
        return None
    arrays = [elements_of(x) for x in operands if not isinstance(x, torch.Tensor) or x.numel() <= LARGEST]
    if any(a is None or a.size > LARGEST for a in arrays) or len(arrays) != len(operands):
        return None
    later = any(isinstance(n, Later) for a in arrays for n in a.flat)  # type: ignore[union-attr]
    if later and name not in ("add", "subtract", "clamp", "reshape", "slice", "concatenate"):
        return None
    if rule is not None:
        try:
            array = _apply(rule, *arrays)  # type: ignore[arg-type]
        except TypeError:  # of two numbers that only a run tells
            return None
    elif name == "compare":
        rules = _COMPARE_BOOLEAN if site.operand(0).element.kind == "bool" else _COMPARE
        array = _apply(rules[site["comparison_direction"]], *arrays)  # type: ignore[arg-type]
    elif name == "convert":
        if site.element.kind == "bool" or site.operand(0).element.kind == "bool":
            return None
        array = arrays[0]
    else:
        array = _STRUCTURAL[name](site, *arrays)
    assert array is not None
    return Sizes(array, site.element)
