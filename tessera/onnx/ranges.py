"""Sizes of an imported graph that leaves again: their names, and for which numbers its program holds.

In: what the caller asks for (`{"x": {0: ("batch", 1, 64)}}`), what the file says of its inputs, and what the recording
found out. Out: a name and a range for every symbol. A range that the program does not hold for is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from tessera.frontends.arguments import Range
from tessera.frontends.onnx.structure import ValueInfo
from tessera.ir.equation import Value
from tessera.ir.types import symbol_of
from tessera.torch_internals.shapes import ShapeEnv, follows, size_functions, sizes_from
from tessera.util.errors import CaptureError, InputError, OptionError

NO_BOUND = 1 << 62  # PyTorch's infinity is beyond
Asked = dict[tuple[str, int], tuple[str, int | None, int | None]]  # input, dimension -> name, least, most


def asked_sizes(dynamic: object, infos: Mapping[str, ValueInfo], inputs: Sequence[str]) -> Asked:
    """What the caller says of sizes, held against the file."""
    asked: Asked = {}
    for name, dims in _mapping(dynamic).items():
        if name not in inputs:
            raise OptionError(f"dynamic: expected one of {', '.join(inputs)}, got {name!r}")
        shape = infos[name].shape
        for dim, size in _mapping(dims).items():
            if shape is not None and not 0 <= dim < len(shape):
                raise OptionError(f"dynamic: {name} has {len(shape)} dimensions, got {dim}")
            if shape is not None and isinstance(shape[dim], int):
                raise OptionError(f"dynamic: dimension {dim} of {name} is {shape[dim]} in the file")
            match size:
                case str(called) | (str(called), *_) if "*" in called:
                    raise OptionError(
                        f"dynamic: a size of a file has a name and a range, and is no multiple: {called!r}"
                    )
                case str():
                    asked[name, dim] = size, None, None
                case (str(called), int(low), int() | None as high):
                    asked[name, dim] = called, low, high
                case _:
                    raise OptionError(f"dynamic: expected a name, or a name and a range, got {size!r}")
    return asked


def _mapping(x: object) -> Mapping:
    if x is None or isinstance(x, Mapping):
        return x or {}
    raise OptionError(f"dynamic: expected arguments and their sizes, as {{'x': {{0: 'batch'}}}}, got {x!r}")


def named_sizes(
    asked: Asked, infos: Mapping[str, ValueInfo], inputs: Mapping[Value, str], ranges: Mapping[str, Range]
) -> tuple[dict[str, str], dict[str, Range]]:
    """Of every symbol its name, by the caller before the file, and its range."""
    names: dict[str, str] = {}
    files: dict[str, str] = {}
    kept = dict(ranges)
    for v, name in inputs.items():
        declared = infos[name].shape or [None] * len(v.tensor.shape)
        for dim, (here, said) in enumerate(zip(v.tensor.shape, declared, strict=True)):
            called, low, high = asked.get((name, dim), (said, None, None))
            if isinstance(here, int) or not (symbol := symbol_of(here)):
                if (name, dim) in asked and not low == high == here:
                    raise OptionError(f"dynamic: the graph holds for {called} of {here} alone, as in the example")
                continue
            if isinstance(said, str):
                _once(files, symbol, said)
            if isinstance(called, str):
                names[symbol] = called if (name, dim) in asked else names.get(symbol, called)
            kept[symbol] = _within(str(called), kept[symbol], low, high)
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise OptionError(f"dynamic: the graph has several sizes, not one, for {twice[0]}")
    return names, kept


def _once(names: dict[str, str], symbol: str, said: str) -> None:
    if names.setdefault(symbol, said) != said:
        raise InputError(
            f"the sizes {names[symbol]} and {said} are equal in the example: give inputs in which they differ"
        )


def _within(name: str, holds: Range, low: int | None, high: int | None) -> Range:
    least, most = holds
    if (low is not None and low < least) or (high is not None and most is not None and high > most):
        told = f"from {least} on" if most is None else f"from {least} to {most}"
        raise OptionError(f"dynamic: the graph holds for {name} {told}, got {low}..{high if high is not None else ''}")
    return least if low is None else low, most if high is None else high


def program_ranges(env: ShapeEnv) -> dict[str, Range]:
    """The sizes that a recorded program holds for: from 1 on, unless it found out that it does not hold for all.
    Afterwards the sizes of `env` are from 2 on, as in the environment of an exported program."""
    high = {str(s): int(r.upper) if r.upper < NO_BOUND else None for s, r in env.var_to_range.items()}
    conditions = _left_over(env, 1)
    low = {str(s): max(1, int(r.lower)) for s, r in env.var_to_range.items()}
    rest = _left_over(env, 2)
    for condition in conditions:
        if condition not in rest:
            low |= {str(s): max(2, low[str(s)]) for s in condition.free_symbols}
        elif (bound := _end_of_slice(condition)) is not None:
            symbol, most = bound
            high[symbol] = min(most, high[symbol] or most)
        else:
            raise CaptureError(f"the graph holds for some sizes only, where {condition}")
    return {s: (low[s], high[s]) for s in low}


def _left_over(env: ShapeEnv, least: int) -> list[Any]:
    """Conditions that do not hold for all sizes in their ranges, once those are at least `least`."""
    sizes_from(env, least)
    return [guard.expr for guard in env.guards if not follows(env, guard.expr)]


def _end_of_slice(condition: Any) -> tuple[str, int] | None:
    """The symbol and the number in `Min(128, s) == s`."""
    left, right = condition.args
    if not isinstance(condition, sympy.Eq) or not isinstance(left, size_functions.Min) or not right.is_Symbol:
        return None
    others = [x for x in left.args if x != right]
    return (str(right), int(others[0])) if len(others) == 1 and others[0].is_Integer else None
