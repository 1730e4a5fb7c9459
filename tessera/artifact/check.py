"""Arguments of a loaded entry: by position or name, checked, flat.

In: what the manifest says of an entry's arguments. Out: a function from a call's arguments to the leaves that its
program takes. Structure, kinds, dtypes, devices and sizes are compared with what was exported; a size of one name is
one size, within its range. `InputError` says which argument, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tessera.artifact.structure import Structure, check_structure, flatten
from tessera.ir.formula import SYMBOL, Formula, Formulas
from tessera.ir.serial_check import is_name
from tessera.ir.strides import with_strides
from tessera.util.errors import ArtifactError, InputError, Unserial

Leaf = Callable[[object, dict[str, int]], object]


@dataclass(frozen=True)
class Arguments:
    """How an entry is called."""

    structure: Structure
    parameters: tuple[str, ...]
    names: tuple[str, ...]  # of flat leaves
    leaves: tuple[Leaf, ...]
    lines: tuple[str, ...]  # of each, what it has to be, for people
    order: tuple[int, ...]  # in which they are checked: those that give sizes a value first

    def flat(self, args: tuple, kwargs: dict) -> list[object]:
        args, kwargs = self._bound(args, kwargs)
        given = flatten((args, kwargs), self.structure, "arguments")
        symbols: dict[str, int] = {}
        for i in self.order:
            given[i] = self.leaves[i](given[i], symbols)
        return given

    def _bound(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Positional arguments that came by name, in their places; and the other way around."""
        wanted, named = len(self.structure[1][0][1]), self.structure[1][1][1]
        if len(args) == wanted and len(kwargs) == len(named):
            return args, kwargs
        kwargs, args = dict(kwargs), tuple(args)
        for name in self.parameters[len(args) : wanted]:
            if name not in kwargs:
                raise InputError(f"expected the argument {name!r}; there are {self._signature()}")
            args = (*args, kwargs.pop(name))
        for name, x in zip(named, args[wanted:], strict=False):
            if name in kwargs:
                raise InputError(f"the argument {name!r} came twice")
            kwargs[name] = x
        if len(args) > wanted + len(named) or set(kwargs) != set(named):
            raise InputError(f"expected {self._signature()}, got {len(args)} and {', '.join(kwargs) or 'no names'}")
        return args[:wanted], kwargs

    def _signature(self) -> str:
        return ", ".join((*self.parameters, *map(str, self.structure[1][1][1]))) or "no arguments"


def arguments_of(entry: dict, device: Callable[[str], torch.device], where: str) -> Arguments:
    """As the manifest says; `device` maps the devices that it names to those that are used."""
    structure, inputs, parameters = entry.get("in"), entry.get("inputs"), entry.get("parameters")
    count = check_structure(structure, f"{where}.in")
    match structure:
        case ["tuple", [["tuple", list(positional)], ["dict", list(), list()]]]:
            pass
        case _:
            raise ArtifactError(f"{where}.in: expected positional and named arguments")
    if not isinstance(parameters, list) or not all(map(is_name, parameters)) or len(parameters) > len(positional):
        raise ArtifactError(f"{where}.parameters: expected the names of {len(positional)} arguments")
    if not isinstance(inputs, list) or len(inputs) != count:
        raise ArtifactError(f"{where}.inputs: expected {count} leaves")
    ranges = ranges_of(entry.get("sizes"), where)
    checks = [_leaf(row, ranges, device, f"{where}.inputs[{i}]") for i, row in enumerate(inputs)]
    names = tuple(row["name"] for row in inputs)
    bound = [_binds(row) for row in inputs]
    if unbound := set(ranges) - {s for binds, _ in bound for s in binds}:
        raise ArtifactError(f"{where}.sizes: no argument has the size {sorted(unbound)[0]}")
    order = tuple(sorted(range(count), key=lambda i: bound[i][1]))
    assert isinstance(structure, list)
    leaves, lines = tuple(leaf for leaf, _ in checks), tuple(line for _, line in checks)
    return Arguments(structure, tuple(parameters), names, leaves, lines, order)


def _binds(row: dict) -> tuple[set[str], bool]:
    """The sizes that an argument tells, and whether it has others that are computed from them."""
    if "symbol" in row:
        return {row["symbol"]}, False
    sizes = [s[1] for s in (*row.get("shape", ()), *row.get("stride", ())) if isinstance(s, list)]
    plain = {s[1] for s in row.get("shape", ()) if isinstance(s, list) and isinstance(s[1], str)}
    return plain, any(not isinstance(tree, str) for tree in sizes)


def ranges_of(sizes: object, where: str) -> dict[str, tuple[int, int | None]]:
    if not isinstance(sizes, dict):
        raise ArtifactError(f"{where}.sizes: expected sizes and their ranges")
    ranges = {}
    for symbol, bounds in sizes.items():
        match bounds:
            case [int(low), (None | int()) as high] if SYMBOL.fullmatch(symbol):
                ranges[symbol] = (low, high)
            case _:
                raise ArtifactError(f"{where}.sizes[{symbol[:40]}]: expected the least and the most")
    return ranges


def _leaf(row: Any, ranges: dict, device: Callable[[str], torch.device], where: str) -> tuple[Leaf, str]:
    try:
        match row:
            case {"name": str(name), "dtype": str(dtype), "device": str(place), "shape": list(), "stride": list()}:
                kind = getattr(torch, dtype, None)
                if is_name(name) and isinstance(kind, torch.dtype):
                    sizes = Formulas(ranges)
                    shape, stride = (tuple(map(sizes.read, row[k])) for k in ("shape", "stride"))
                    return _tensor(name, kind, device(place), shape, stride, bool(row.get("written")), ranges)
            case {"name": str(name), "symbol": str(symbol)} if is_name(name) and symbol in ranges:
                return _number(name, symbol, ranges), f"{name}: int {symbol}"
            case {"name": str(name), "value": None | bool() | int() | float() | str()} if is_name(name):
                return _constant(name, row["value"]), f"{name}: {row['value']!r}"
    except (Unserial, RuntimeError) as error:
        raise ArtifactError(f"{where}: {error}") from None
    raise ArtifactError(f"{where}: expected an argument, got {str(row)[:80]}")


def _constant(name: str, value: object) -> Leaf:
    def check(x: object, symbols: dict[str, int]) -> object:
        if x is not value and (type(x) is not type(value) or x != value):
            got = f"a tensor of {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
            raise InputError(f"{name}: expected {value!r}, which it was exported for, got {got}")
        return x

    return check


def _number(name: str, symbol: str, ranges: dict) -> Leaf:
    def check(x: object, symbols: dict[str, int]) -> object:
        if type(x) is not int:
            raise InputError(f"{name}: expected an int, got {type(x).__name__}")
        _bind(name, symbol, x, symbols, ranges)
        return x

    return check


def _bind(name: str, symbol: str, size: int, symbols: dict[str, int], ranges: dict) -> None:
    known = symbols.setdefault(symbol, size)
    if known != size:
        raise InputError(f"{name}: expected {symbol} = {known}, as another argument has it, got {size}")
    low, high = ranges[symbol]
    if size < low or (high is not None and size > high):
        raise InputError(f"{name}: expected {symbol} from {low} to {'any size' if high is None else high}, got {size}")


def _tensor(
    name: str, dtype: torch.dtype, device: torch.device, shape: tuple, stride: tuple, written: bool, ranges: dict
) -> tuple[Leaf, str]:
    ndim = len(shape)
    fixed = tuple((d, n) for d, n in enumerate(shape) if isinstance(n, int))
    bound = tuple((d, n.tree) for d, n in enumerate(shape) if isinstance(n, Formula) and isinstance(n.tree, str))
    computed = tuple((d, n) for d, n in enumerate(shape) if isinstance(n, Formula) and not isinstance(n.tree, str))
    text = f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}] on {device}"
    indexed = device.index is not None
    dense = all(isinstance(n, int) for n in (*shape, *stride)) and _row_major(shape, stride)

    def check(x: object, symbols: dict[str, int]) -> object:
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
            raise InputError(f"{name}: expected a tensor, {text}, got {type(x).__name__}")
        place = x.device
        if x.dtype is not dtype or x.ndim != ndim or place.type != device.type or (indexed and place != device):
            raise InputError(f"{name}: expected {text}, got {_told(x)}")
        sizes = x.shape
        for d, n in fixed:
            if sizes[d] != n:
                raise InputError(f"{name}: expected {text}, got {_told(x)}")
        for d, symbol in bound:
            _bind(f"{name}, dimension {d}", symbol, sizes[d], symbols, ranges)
        for d, n in computed:
            if sizes[d] != n.value(symbols):
                raise InputError(f"{name}: expected {n.value(symbols)} along dimension {d} ({n}), got {_told(x)}")
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError(f"{name} requires gradients, which no artifact computes; try torch.no_grad()")
        if dense and x.is_contiguous():
            return x
        steps = tuple(s.value(symbols) if isinstance(s, Formula) else s for s in stride)
        if x.stride() == steps or (laid := with_strides(x, steps)) is x:
            return x
        if written:
            raise InputError(f"{name} is written: expected strides {steps}, got {x.stride()}")
        return laid

    return check, f"{name}: {text}"


def _row_major(shape: tuple, stride: tuple) -> bool:
    step = 1
    for size, own in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and own != step:
            return False
        step *= size
    return True


def _told(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(str, x.shape))}] on {x.device}"
