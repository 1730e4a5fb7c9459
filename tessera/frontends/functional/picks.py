"""`x[i]` where `i` is a number that a tensor holds.

PyTorch asks such a tensor for its number and takes a view there; a traced program has no number to give. So while a
function is traced the place is picked by an equation, `aten.index`, and the recorder is told that the result is a
view: what is written to it is written to `x`. A number known while tracing, as in `x[torch.tensor(1)]`, is used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.frontends.functional.trace import WATCHED, tracing
from tessera.ir.alias import Ref, View
from tessera.ir.literals import constant_of
from tessera.ir.record import recording
from tessera.torch_internals.autograd import TensorBase

_INDEX = torch.ops.aten.index.Tensor
_GET, _SET = TensorBase.__getitem__, TensorBase.__setitem__
_NOT_NUMBERS = (torch.bool, torch.uint8)  # masks


def _is_number(i: object) -> bool:
    """A tensor of one whole number that only a run would tell."""
    if not isinstance(i, torch.Tensor) or i.dim() or i.dtype in _NOT_NUMBERS or i.is_floating_point():
        return False
    return not i.is_complex() and constant_of(i) is None


def picked(x: torch.Tensor, index: object) -> tuple[torch.Tensor, object]:
    """`x` where tensors of the index have chosen one place in a dimension each, and the index that is left."""
    entries = list(index) if isinstance(index, tuple) else [index]
    for at, i in enumerate(entries):
        if _is_number(i):
            x = _pick(x, _dimension(x, entries, at), i)  # type: ignore[arg-type]
            entries[at] = 0
    return x, tuple(entries) if isinstance(index, tuple) else entries[0]


def _dimension(x: torch.Tensor, entries: list, at: int) -> int:
    """The dimension of `x` that the entry at `at` speaks of."""
    if any(e is Ellipsis for e in entries[:at]):
        return x.dim() - sum(map(_taken, entries[at:]))
    return sum(map(_taken, entries[:at]))


def _taken(entry: object) -> int:
    """How many dimensions an entry of an index speaks of."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.dim() if isinstance(entry, torch.Tensor) and entry.dtype in _NOT_NUMBERS else 1


def _pick(x: torch.Tensor, dim: int, i: torch.Tensor) -> torch.Tensor:
    """The part of `x` at place `i`, which stays a dimension of size one."""
    recorder = recording()
    assert recorder is not None
    where = [None] * dim + [i.reshape(1)]
    out = _INDEX(x, where)
    parent, own = recorder.ref(x), recorder.ref(out)
    view = View(parent, _INDEX, (recorder.lower(where),), {})
    recorder.refs[id(out)] = Ref(out, own.value, parent.root, view, parent.root.version)
    return out


def _watched_get(_: object) -> Callable:
    def getitem(self: torch.Tensor, index: object) -> torch.Tensor:
        return _GET(*picked(self, index)) if _asks(index) else _GET(self, index)

    return getitem


def _watched_set(_: object) -> Callable:
    def setitem(self: torch.Tensor, index: object, value: object) -> None:
        if _asks(index):
            _SET(*picked(self, index), value)  # type: ignore[arg-type]
        else:
            _SET(self, index, value)  # type: ignore[arg-type]

    return setitem


def _asks(index: object) -> bool:
    entries = index if isinstance(index, tuple) else (index,)
    return any(map(_is_number, entries)) and tracing()


WATCHED.append((torch.Tensor, "__getitem__", _watched_get))
WATCHED.append((torch.Tensor, "__setitem__", _watched_set))
