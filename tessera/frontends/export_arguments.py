"""Arguments of an exported program, held against those it was exported for.

In: the flat arguments of a call. Out: the same, laid out as the program expects them. Kinds, dtypes, devices and sizes
are compared; a size that was exported as dynamic is one size wherever it stands, within its range. `InputError` says
which argument, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import sympy
import torch

from tessera.ir.expression import NAMES, expression
from tessera.ir.strides import with_strides
from tessera.ir.types import Size, contiguous_strides, symbol_of
from tessera.util.errors import InputError

Bound = dict[str, int]  # sizes by their symbols
Check = Callable[[object, Bound], object]


class Arguments:
    def __init__(
        self,
        names: Sequence[str],
        examples: Sequence[object],
        ranges: Mapping[sympy.Expr, object],
        written: Iterable[int] = (),
    ) -> None:
        self.ranges = {str(size): _bounds(held) for size, held in ranges.items()}
        pairs, mutated = zip(names, examples, strict=True), frozenset(written)
        self.checks: list[Check] = [self.check(name, x, i in mutated) for i, (name, x) in enumerate(pairs)]
        # Sizes that are computed from others are compared when those are known.
        self.order = sorted(range(len(self.checks)), key=lambda i: _computed(examples[i]))

    def __call__(self, leaves: list[object]) -> list[object] | None:
        """None where an argument that is written lies so that only eager PyTorch can take it."""
        bound: Bound = {}
        for i in self.order:
            leaves[i] = self.checks[i](leaves[i], bound)
        return None if any(leaf is _ELSEWHERE for leaf in leaves) else leaves

    def check(self, name: str, example: object, written: bool) -> Check:
        if isinstance(example, torch.Tensor):
            return self.tensor(name, example, written)
        if isinstance(example, torch.SymInt):
            return self.number(name, example)

        def same(x: object, bound: Bound) -> object:
            if type(x) is not type(example) or x != example:
                raise InputError(f"{name}: expected {example!r}, which the program was exported for, got {_told(x)}")
            return x

        return same

    def number(self, name: str, example: torch.SymInt) -> Check:
        size = self.size(name, example)

        def number(x: object, bound: Bound) -> object:
            if type(x) is not int:
                raise InputError(f"{name}: expected an int, got {_told(x)}")
            size(x, bound)
            return x

        return number

    def tensor(self, name: str, example: torch.Tensor, written: bool) -> Check:
        dtype, device, ndim = example.dtype, example.device, example.ndim
        sizes = [self.size(f"{name}, dimension {d}", n) for d, n in enumerate(example.shape)]
        stride = _strides(example)

        def tensor(x: object, bound: Bound) -> object:
            if not isinstance(x, torch.Tensor):
                raise InputError(f"{name}: expected a tensor, got {_told(x)}")
            if x.dtype != dtype or x.device.type != device.type or x.ndim != ndim:
                raise InputError(f"{name}: expected {dtype} of {ndim} dimensions on {device.type}, got {_told(x)}")
            for size, n in zip(sizes, x.shape, strict=True):
                size(n, bound)
            laid = with_strides(x, stride(x, bound))
            return _ELSEWHERE if written and laid is not x else laid

        return tensor

    def size(self, where: str, example: Size) -> Callable[[int, Bound], None]:
        if isinstance(example, int):

            def fixed(n: int, bound: Bound) -> None:
                if n != example:
                    raise InputError(f"{where}: expected {example}, which the program was exported for, got {n}")

            return fixed
        if not symbol_of(example):
            return _expression(where, example)
        symbol = symbol_of(example)
        low, high = self.ranges.get(symbol, (0, None))

        def dynamic(n: int, bound: Bound) -> None:
            if n < low or (high is not None and n > high):
                raise InputError(f"{where}: expected {low} to {'any size' if high is None else high}, got {n}")
            if bound.setdefault(symbol, n) != n:
                raise InputError(f"{where}: expected {bound[symbol]}, the size of another argument, got {n}")

        return dynamic


_ELSEWHERE = object()


def _expression(where: str, example: torch.SymInt) -> Callable[[int, Bound], None]:
    text = expression(example)
    code = compile(text, where, "eval")

    def computed(n: int, bound: Bound) -> None:
        expected = eval(code, {**NAMES, **bound})  # our own text, of PyTorch's expression
        if n != expected:
            raise InputError(f"{where}: expected {expected}, which is {text}, got {n}")

    return computed


def _strides(example: torch.Tensor) -> Callable[[torch.Tensor, Bound], tuple]:
    if example.is_contiguous():
        return lambda x, bound: contiguous_strides(x.shape)  # type: ignore[return-value]
    codes = [s if isinstance(s, int) else compile(expression(s), "stride", "eval") for s in example.stride()]
    return lambda x, bound: tuple(c if isinstance(c, int) else eval(c, {**NAMES, **bound}) for c in codes)


def _computed(example: object) -> bool:
    sizes = example.shape if isinstance(example, torch.Tensor) else (example,)
    return any(isinstance(n, torch.SymInt) and not symbol_of(n) for n in sizes)


def _bounds(held: object) -> tuple[int, int | None]:
    low, high = held.lower, held.upper  # type: ignore[attr-defined]
    return int(low) if low.is_Integer else 0, int(high) if high.is_Integer else None


def _told(x: object) -> str:
    return f"{x.dtype} of {tuple(x.shape)} on {x.device}" if isinstance(x, torch.Tensor) else repr(x)[:80]
