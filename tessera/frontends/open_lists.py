"""Loops over open sizes while a model is exported: what functions call whose loops `open_loops.py` has rewritten.

In: an iterable, the body of a loop, what goes round and what is read row by row. Out: PyTorch's scan over the rows; a
list with an open number of tensors is an `OpenList`. Whatever else Python does with such a list is refused, since
nobody knows how long it is.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from tessera.torch_internals.higher_order import torch_scan
from tessera.util.errors import CaptureError


@dataclass(frozen=True)
class OpenRange:
    start: int | torch.SymInt
    stop: int | torch.SymInt

    def __len__(self) -> NoReturn:
        raise CaptureError("a range over an open size has no length that is a number")

    @property
    def count(self) -> int | torch.SymInt:
        return self.stop - self.start

    def rows(self, x: object, dim: int, offset: int) -> torch.Tensor:
        """The rows of a tensor that the loop reads, in front."""
        return self.place(x, dim, offset).movedim(dim, 0)

    def place(self, x: object, dim: int, offset: int) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            raise CaptureError(f"a loop over an open size reads rows of tensors, got {type(x).__name__}")
        first = self.start + offset
        if first < 0:
            raise CaptureError("a loop over an open size reads a row before the first one")
        whole = isinstance(first, int) and first == 0 and x.shape[dim] == self.stop
        return x if whole else x.narrow(dim, first, self.count)  # type: ignore[arg-type]


class OpenList(list):
    """A list of as many tensors as an open size says, which lie in one tensor; `torch.stack` and `torch.cat` read it.

    PyTorch looks into a list without asking it, and finds one element there, which takes the call.
    """

    def __init__(self, stacked: torch.Tensor) -> None:
        super().__init__([_Element(stacked)])
        self.stacked = stacked

    def __getitem__(self, i: Any) -> Any:
        return OpenList(self.stacked[i]) if isinstance(i, slice) else self.stacked[i]

    def _refused(self, *args: object) -> NoReturn:
        raise CaptureError("a list with an open number of tensors: expected torch.stack or torch.cat of it")

    __len__ = __iter__ = __reversed__ = __contains__ = __add__ = __iadd__ = __mul__ = __eq__ = __ne__ = _refused  # type: ignore[assignment]
    __setitem__ = __delitem__ = append = extend = insert = pop = remove = copy = index = count = _refused  # type: ignore[assignment]
    __bool__ = __hash__ = reverse = sort = clear = _refused  # type: ignore[assignment]


class _Element:
    """What PyTorch finds in an `OpenList`."""

    def __init__(self, stacked: torch.Tensor) -> None:
        self.stacked = stacked

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        named = dict(kwargs or {})
        given = args[0] if args else named.pop("tensors", None)
        dim = args[1] if len(args) > 1 else named.pop("dim", named.pop("axis", 0))
        if func not in _JOINS or not isinstance(given, OpenList) or named:
            raise CaptureError(f"a list with an open number of tensors is joined by stack or cat, not by {func}")
        return _JOINS[func](given.stacked, dim)


def _stack(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.movedim(0, dim)


def _cat(x: torch.Tensor, dim: int) -> torch.Tensor:
    dim = dim + x.ndim - 1 if dim < 0 else dim
    return x.movedim(0, dim).flatten(dim, dim + 1)


_JOINS = {torch.stack: _stack, torch.cat: _cat, torch.concat: _cat, torch.concatenate: _cat}


def ranged(kind: object, *args: Any) -> object:
    """`range(*args)`, or an open one."""
    if kind is builtins.range and any(isinstance(x, torch.SymInt) for x in args) and len(args) < 3:
        return OpenRange(*args) if len(args) == 2 else OpenRange(0, *args)
    return kind(*args)  # type: ignore[operator]


def listed(kind: object, *args: Any) -> object:
    """`list(x)`, or an open one of the rows of a tensor."""
    rows = args[0] if kind is builtins.list and len(args) == 1 else None
    return OpenList(rows) if isinstance(rows, torch.Tensor) and is_open(rows) else kind(*args)  # type: ignore[operator]


def is_open(over: object) -> bool:
    if isinstance(over, torch.Tensor):
        return over.ndim > 0 and isinstance(over.shape[0], torch.SymInt)
    return isinstance(over, (OpenRange, OpenList))


def loop(over: Any, body: Callable, carried: tuple, rows: tuple) -> tuple[tuple, tuple]:
    """What went round after the last turn, and what each turn gave, stacked. `rows`: (tensor, dim, offset) of which the
    body reads a row; dim None is the iterable itself."""
    for x in carried:
        if not isinstance(x, torch.Tensor):
            raise CaptureError(f"a loop over an open size carries tensors, got {type(x).__name__}")
    around = over if isinstance(over, OpenRange) else OpenRange(0, _whole(over).shape[0])
    read = [_whole(over) if dim is None else around.rows(x, dim, offset) for x, dim, offset in rows]
    # scan wants something that goes round, and something that it is as long as
    start = tuple(x.contiguous() for x in carried) or (torch.zeros(()),)
    read = read or [torch.zeros(around.count)]  # type: ignore[call-overload]
    with torch.no_grad():
        out, given = torch_scan(body, start, tuple(read))
    return (out if carried else ()), given


def _whole(over: Any) -> torch.Tensor:
    return over.stacked if isinstance(over, OpenList) else over


def appended(to: object, given: torch.Tensor) -> OpenList:
    if type(to) is not builtins.list or to:
        raise CaptureError("a loop over an open size appends to an empty list")
    return OpenList(given)


def stored(to: torch.Tensor, over: Any, dim: int, offset: int, given: torch.Tensor) -> None:
    around = over if isinstance(over, OpenRange) else OpenRange(0, _whole(over).shape[0])
    place = around.place(to, dim, offset)
    new = given.movedim(0, dim) if given.ndim == place.ndim else None
    if new is None or any(a != b for a, b in zip(new.shape, place.shape, strict=True)):
        raise CaptureError("a loop over an open size writes rows of other sizes than those of the tensor")
    place.copy_(new)


def mapped(over: Any, body: Callable, rows: tuple) -> OpenList:
    """`[f(x) for x in over]`."""

    def turn(carry: tuple, read: tuple) -> tuple:
        return (carry[0].clone(),), (body(*read[: len(rows)]).contiguous().clone(),)

    return OpenList(loop(over, turn, (), rows)[1][0])
