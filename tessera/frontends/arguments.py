"""Flat arguments of a program, held against those it was exported for.

In: what each argument has to be, and the range of every size that has a name. Out: a function from the arguments of a
call to the same, laid out as the program expects them. Kinds, dtypes, devices and sizes are compared; a size of one
name is one size, within its range. `InputError` says which argument, what was expected and what came. Sizes are numbers
and formulas over names, so that a program that is only loaded is checked without SymPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tessera.ir.formula import Formula, row_major
from tessera.ir.strides import resolved, with_strides
from tessera.ir.types import overlaps_itself
from tessera.util.errors import InputError

Number = int | Formula
Range = tuple[int, int | None]  # the least and the most; None where there is no bound
Known = dict[str, int]  # sizes by their names
Check = Callable[[object, Known], object]


@dataclass(frozen=True)
class TensorLeaf:
    name: str
    dtype: torch.dtype
    device: torch.device  # without an index: any of the kind
    shape: tuple[Number, ...]
    stride: tuple[Number, ...]
    written: bool = False  # or seen through a view that the caller gets: taken as it lies, or not at all
    layout: torch.layout = torch.strided

    def __str__(self) -> str:
        sizes = ", ".join(map(told_size, self.shape))
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}] on {self.device}"

    @property
    def sizes(self) -> tuple[Number, ...]:
        return (*self.shape, *self.stride)

    def renamed(self, names: Mapping[str, str]) -> TensorLeaf:
        shape, stride = (tuple(_renamed(n, names) for n in part) for part in (self.shape, self.stride))
        return replace(self, shape=shape, stride=stride)


@dataclass(frozen=True)
class SizeLeaf:
    """A number that is a size."""

    name: str
    size: Number

    def __str__(self) -> str:
        return f"int {told_size(self.size)}"

    @property
    def sizes(self) -> tuple[Number, ...]:
        return (self.size,)

    def renamed(self, names: Mapping[str, str]) -> SizeLeaf:
        return SizeLeaf(self.name, _renamed(self.size, names))


@dataclass(frozen=True)
class ValueLeaf:
    """What is part of the program: no other value will do."""

    name: str
    value: object
    sizes: tuple[Number, ...] = ()

    def __str__(self) -> str:
        return repr(self.value)

    def renamed(self, names: Mapping[str, str]) -> ValueLeaf:
        return self


Leaf = TensorLeaf | SizeLeaf | ValueLeaf


def symbols_of(leaves: Iterable[Leaf]) -> set[str]:
    """The sizes that arguments have."""
    return {name for leaf in leaves for size in leaf.sizes if isinstance(size, Formula) for name in size.names}


class MislaidError(InputError):
    """An argument that is written, or whose views are results, lies otherwise than the program was compiled for."""


class Arguments:
    """`names`: what people call the sizes, by their symbols. `gradients`: whether the program computes them; otherwise
    an argument that requires them is refused."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        ranges: Mapping[str, Range],
        names: Mapping[str, str] | None = None,
        gradients: bool = True,
    ) -> None:
        names = names or {}
        self.leaves, self.gradients = tuple(leaf.renamed(names) for leaf in leaves), gradients
        self.ranges = {names.get(symbol, symbol): bounds for symbol, bounds in ranges.items()}
        self._checks = [self._check(leaf) for leaf in self.leaves]
        # Sizes that are computed from others are compared when those are known.
        self._order = sorted(range(len(self.leaves)), key=lambda i: _computed(self.leaves[i]))
        self._written = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, TensorLeaf) and leaf.written]

    def __call__(self, given: list[object]) -> list[object]:
        known: Known = {}
        for i in self._order:
            given[i] = self._checks[i](given[i], known)
        for i in self._written:
            if isinstance(given[i], MislaidError):
                raise given[i]  # type: ignore[misc]  # after all that no program could take
        return given

    def lines(self) -> list[str]:
        """What each argument has to be, for people."""
        return [f"{leaf.name}: {leaf}" for leaf in self.leaves]

    def _check(self, leaf: Leaf) -> Check:
        match leaf:
            case TensorLeaf():
                return self._tensor(leaf)
            case SizeLeaf():
                return self._number(leaf)
        return _value(leaf)

    def _number(self, leaf: SizeLeaf) -> Check:
        name, size = leaf.name, self._size(leaf.name, leaf.size)

        def check(x: object, known: Known) -> object:
            if type(x) is not int:
                raise InputError(f"{name}: expected an int, got {told(x)}")
            size(x, known)
            return x

        return check

    def _tensor(self, leaf: TensorLeaf) -> Check:
        name, dtype, device, layout, ndim = leaf.name, leaf.dtype, leaf.device, leaf.layout, len(leaf.shape)
        fixed = [(d, n) for d, n in enumerate(leaf.shape) if isinstance(n, int)]
        sizes = [(d, self._size(_where(name, d), n)) for d, n in enumerate(leaf.shape) if isinstance(n, Formula)]
        indexed, written, gradients = device.index is not None, leaf.written, self.gradients
        dense, stride = row_major(leaf.shape, leaf.stride), leaf.stride

        def check(x: object, known: Known) -> object:
            if not isinstance(x, torch.Tensor):
                raise InputError(f"{name}: expected a tensor, {leaf}, got {told(x)}")
            place = x.device
            other = x.dtype is not dtype or x.ndim != ndim or x.layout is not layout or place.type != device.type
            if other or (indexed and place != device):
                raise InputError(f"{name}: expected {leaf}, got {told(x)}")
            shape = x.shape
            for d, n in fixed:
                if shape[d] != n:
                    raise _another(_where(name, d), n, shape[d])
            for d, size in sizes:
                size(shape[d], known)
            if not gradients and x.requires_grad and torch.is_grad_enabled():
                raise InputError(f"{name} requires gradients, which no artifact computes; try torch.no_grad()")
            if layout is not torch.strided:
                return x
            plain = resolved(x)
            if plain is x and dense and x.is_contiguous():
                return x
            steps = tuple(s.value(known) if isinstance(s, Formula) else s for s in stride)
            laid = plain if plain.stride() == steps else with_strides(plain, steps)
            if laid is not plain and x.numel() and overlaps_itself(shape, steps):
                raise InputError(f"{name}: expected strides {steps}, which show elements twice, got {plain.stride()}")
            if written and laid is not x:
                why = f"{name} is written, or the caller gets a view of it"
                came = x.stride() if plain is x else "a tensor that is conjugated or negated as it is read"
                return MislaidError(f"{why}: expected strides {steps}, got {came}")
            return laid

        return check

    def _size(self, where: str, size: Number) -> Callable[[int, Known], None]:
        if isinstance(size, int):
            return _fixed(where, size)
        if not isinstance(size.tree, str):
            return self._formula(where, size)
        name, (low, high) = size.tree, self.ranges.get(size.tree, (0, None))

        def named(n: int, known: Known) -> None:
            if n < low or (high is not None and n > high):
                told = f"{where}: expected {name} from {low} to {told_bound(high)}, got {n}"
                raise InputError(f"{told}; {ALONE}" if n == 1 and low == 2 else told)
            if known.setdefault(name, n) != n:
                raise InputError(f"{where}: expected {name} = {known[name]}, the size of another argument, got {n}")

        return named

    def _formula(self, where: str, size: Formula) -> Callable[[int, Known], None]:
        names, text = sorted(size.names), told_size(size)

        def computed(n: int, known: Known) -> None:
            missing = [name for name in names if name not in known]
            if missing:
                low, high = self.ranges.get(missing[0], (0, None))
                number = size.solved(missing[0], n, known) if len(missing) == 1 else None
                if number is None or number < low or (high is not None and number > high):
                    told = f"with {missing[0]} from {low} to {told_bound(high)}"
                    raise InputError(f"{where}: expected {text} {told}, got {n}")
                known[missing[0]] = number
            elif n != (expected := size.value(known)):
                raise InputError(f"{where}: expected {expected}, which is {text}, got {n}")

        return computed


def _renamed(size: Number, names: Mapping[str, str]) -> Number:
    return size.renamed(names) if isinstance(size, Formula) else size


def _fixed(where: str, size: int) -> Callable[[int, Known], None]:
    def fixed(n: int, known: Known) -> None:
        if n != size:
            raise _another(where, size, n)

    return fixed


def _where(name: str, dim: int) -> str:
    return f"{name}, dimension {dim}"


def _another(where: str, expected: object, got: object) -> InputError:
    return InputError(f"{where}: expected {expected!r}, which the program was exported for, got {told(got)}")


def _value(leaf: ValueLeaf) -> Check:
    name, value = leaf.name, leaf.value

    def check(x: object, known: Known) -> object:
        if x is not value and (type(x) is not type(value) or not _same(x, value)):
            raise _another(name, value, x)
        return x

    return check


def _same(x: object, value: object) -> bool:
    """Of one type. No number is equal to itself where it is none, and zeros of both signs are equal."""
    return repr(x) == repr(value) if isinstance(x, (float, complex)) else x == value


def _computed(leaf: Leaf) -> bool:
    return any(isinstance(n, Formula) and not isinstance(n.tree, str) for n in leaf.sizes)


def told(x: object) -> str:
    """An argument that came, for people."""
    if not isinstance(x, torch.Tensor):
        return repr(x)[:80]
    layout = "" if x.layout is torch.strided else f" ({str(x.layout).removeprefix('torch.')})"
    return f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(str, x.shape))}]{layout} on {x.device}"


# Programs begin with 2 where nobody said so because the model asks whether a size is 1.
ALONE = "a model that computes for 1 in a way of its own is exported for that size as another entry"


def told_bound(high: int | None) -> str:
    return "any size" if high is None else str(high)


def told_size(size: Number) -> str:
    text = str(size)
    return text[1:-1] if isinstance(size, Formula) and text.startswith("(") else text
