"""Operators that give elements of their arguments, at places that do not depend on what these hold.

In: an equation and the maps of what it reads. Out: the maps of its results. Views are asked of PyTorch itself, one
dimension at a time, on tensors without data. Reshapes, concatenations and repetitions have rules. Any other operator
runs on the numbers of elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from tessera.ir.equation import Equation, Value, map_values
from tessera.spatial.importer.numbers import from_numbers, numbers
from tessera.spatial.maps import Home, Map, concatenated, padded
from tessera.util.names import names

SHAPES = names(
    """
    view reshape _unsafe_view squeeze unsqueeze flatten view_as reshape_as unflatten view_copy squeeze_copy clone
    contiguous alias detach lift_fresh_copy lift_fresh
    """
)  # the same elements in the same order
VIEWS = names(
    """
    permute transpose t expand slice select split split_with_sizes chunk unbind narrow unfold movedim swapaxes
    expand_as diagonal numpy_T mT T hsplit vsplit tensor_split broadcast_to
    """
)  # each result's place is an affine function of an argument's
NUMBERED = names("flip roll select_scatter slice_scatter tril triu rot90 pixel_shuffle pixel_unshuffle")
PADS = names("constant_pad_nd pad tril triu")  # these fill with zeros


def moved(eqn: Equation, maps: Mapping[Value, Map], homes: Sequence[Home]) -> list[Map]:
    """The maps of an equation's results."""
    args, kwargs = eqn.bound()
    given = map_values(args, maps.__getitem__)
    if eqn.opname in SHAPES:
        return [given[0].reshape(*eqn.results()[0].shape)]  # type: ignore[index,union-attr]
    if eqn.opname in VIEWS:
        return viewed(given[0], lambda x: eqn.op(*_with(eqn, x)))  # type: ignore[index,operator,arg-type]
    if (rule := _RULES.get(eqn.opname)) is not None:
        return [rule(*given, **kwargs)]  # type: ignore[misc]
    shift = int(eqn.opname in PADS)  # zeros are what comes out where nothing goes in
    every = {v: numbers(m) + shift for v, m in maps.items()}
    out = eqn.op(*map_values(eqn.args, every.__getitem__), **map_values(eqn.kwargs, every.__getitem__))  # type: ignore[operator,misc]
    return [from_numbers(t - shift, homes) for t in (out if isinstance(out, (list, tuple)) else [out])]


def _with(eqn: Equation, x: torch.Tensor) -> list[object]:
    """The arguments of a view, with another tensor to look at."""
    positional, _ = eqn.bound()
    return [x, *map_values(positional[1:], lambda v: torch.empty(v.shape, device="meta"))]  # type: ignore[misc]


def viewed(m: Map, view: Callable[[torch.Tensor], torch.Tensor | Sequence[torch.Tensor]]) -> list[Map]:
    """What a view shows. A tensor that strides along one dimension alone tells how places depend on that one."""
    looks = []
    for d in range(m.ndim):
        strides = [int(e == d) for e in range(m.ndim)]
        out = view(torch.empty(max(m.shape[d], 1), device="meta").as_strided(m.shape, strides))
        looks.append(list(out) if isinstance(out, (list, tuple)) else [out])
    if not looks:
        out = view(torch.empty((), device="meta"))
        looks, m = [[out]], m.reshape(1)  # type: ignore[list-item]
    results = []
    for tensors in zip(*looks, strict=True):
        shape = tuple(tensors[0].shape)
        steps = [[s if n > 1 else 0 for s, n in zip(t.stride(), shape, strict=True)] for t in tensors]
        results.append(m.view(shape, [int(t.storage_offset()) for t in tensors], steps))
    return results


def chosen(t: torch.Tensor | Map, places: tuple, homes: Sequence[Home]) -> torch.Tensor | Map:
    """Elements at places that are known."""
    return t[places] if isinstance(t, torch.Tensor) else from_numbers(numbers(t)[places], homes)


def repeated(t: torch.Tensor | Map, dim: int, times: int) -> torch.Tensor | Map:
    """Each element along a dimension so many times in a row."""
    before, n, behind = t.shape[:dim], t.shape[dim], t.shape[dim + 1 :]
    expanded = t.reshape(*before, n, 1, *behind).expand(*before, n, times, *behind)
    return expanded.reshape(*before, n * times, *behind)


def _concatenated(maps: Sequence[Map], dim: int = 0) -> Map:
    some = [m for m in maps if m.shape != (0,)]  # PyTorch passes over these
    return concatenated(some, dim % some[0].ndim)


def _stacked(maps: Sequence[Map], dim: int = 0) -> Map:
    at = dim % (maps[0].ndim + 1)
    return concatenated([m.reshape(*m.shape[:at], 1, *m.shape[at:]) for m in maps], at)


def _tiled(m: Map, repeats: Sequence[int]) -> Map:
    m = m.reshape(*(1,) * (len(repeats) - m.ndim), *m.shape)
    split = [n for size in m.shape for n in (1, size)]
    wide = [n for times, size in zip(repeats, m.shape, strict=True) for n in (times, size)]
    return m.reshape(*split).expand(*wide).reshape(*(t * n for t, n in zip(repeats, m.shape, strict=True)))


def _interleaved(m: Map, times: int, dim: int | None = None, **_: object) -> Map:
    m, dim = (m.reshape(math.prod(m.shape)), 0) if dim is None else (m, dim % m.ndim)
    result = repeated(m, dim, times)
    assert isinstance(result, Map)
    return result


def _strided(m: Map, shape: Sequence[int], strides: Sequence[int], start: int | None = None) -> Map:
    return m.reshape(m.size).view(tuple(shape), [start or 0], [list(strides)])


def _padded(m: Map, sides: Sequence[int], *_: object, **__: object) -> Map:
    return padded(m, sides)


_RULES: dict[str, Callable[..., Map]] = {
    **dict.fromkeys(("cat", "concat", "concatenate"), _concatenated), "stack": _stacked, "repeat": _tiled,
    "repeat_interleave": _interleaved, "constant_pad_nd": _padded, "pad": _padded, "as_strided": _strided,
}  # fmt: skip
MOVES = SHAPES | VIEWS | NUMBERED | frozenset(_RULES)


def has_rule(eqn: Equation) -> bool:
    """Padding repeats or mirrors what is there, unless it says a value; strides are those of what lies row by row."""
    if eqn.opname == "pad":
        return eqn.bound()[0][2] == "constant"
    return eqn.opname != "as_strided" or eqn.inputs()[0].tensor.is_row_major


def filled_with(eqn: Equation) -> float:
    """What stands where padding is."""
    place = {"constant_pad_nd": 2, "pad": 3}.get(eqn.opname)
    return 0 if place is None else eqn.bound()[0][place] or 0


def padded_ones(eqn: Equation) -> torch.Tensor:
    """Where the result of a padding is no padding."""
    positional, _ = eqn.bound()
    inside = torch.ones([int(n) for n in positional[0].shape], dtype=torch.bool)
    return torch.nn.functional.pad(inside, list(positional[1]))
