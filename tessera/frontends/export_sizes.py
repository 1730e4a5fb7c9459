"""Sizes that may change, as `torch.export` takes them.

In: what the user says of some of the arguments, and the arguments. Out: the same with PyTorch's `Dim`s, in the
structure of all arguments: PyTorch refuses a structure of which nothing is said. `grown` gives arguments whose open
sizes stay open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.export import Dim

from tessera.torch_internals import pytree
from tessera.util.errors import OptionError

GROWN = 4  # PyTorch takes sizes of 0 and 1 for constants
MULTIPLE = re.compile(r"([1-9]\d*) ?\* ?([A-Za-z]\w*)")  # such as 8*n


def dynamic_shapes(dynamic: object, given: Mapping[str, object]) -> object:
    """`{"x": {0: "batch", 1: ("length", 1, 512), 2: "8*n"}}` as PyTorch wants it: a size of one name is one size."""
    if dynamic is None:
        return None
    if not isinstance(dynamic, Mapping):
        raise OptionError(f"dynamic: expected arguments and their sizes, as {{'x': {{0: 'batch'}}}}, got {dynamic!r}")
    if unknown := [name for name in dynamic if name not in given]:
        raise OptionError(f"dynamic: expected one of {', '.join(given)}, got {unknown[0]!r}")
    dims: dict[str, Dim] = {}
    return {name: _shapes(dynamic.get(name), x, name, lambda size: _dim(size, dims)) for name, x in given.items()}


def _shapes(spec: object, x: object, name: str, dim: Callable[[object], object]) -> object:
    """Of one argument. Members of structures are named by their keys, fields or places."""
    if isinstance(x, torch.Tensor):
        return _of_tensor(spec, x, name, dim)
    if pytree.is_leaf(x):
        return dim(spec)
    members = pytree.members(x)
    if isinstance(spec, (list, tuple)):
        if len(spec) != len(members):
            raise OptionError(f"dynamic: {name} has {len(members)} members, got sizes of {len(spec)}")
        spec = dict(zip(members, spec, strict=True))
    if spec is not None and not isinstance(spec, Mapping):
        raise OptionError(f"dynamic: {name} is a {type(x).__name__}: expected sizes of its members, got {spec!r}")
    if unknown := [key for key in spec or () if key not in members]:
        raise OptionError(f"dynamic: {name} has {', '.join(map(str, members))}, got {unknown[0]!r}")
    shapes = [_shapes((spec or {}).get(key), member, f"{name}.{key}", dim) for key, member in members.items()]
    return pytree.beside(x, shapes)


def _of_tensor(spec: object, x: torch.Tensor, name: str, dim: Callable[[object], object]) -> object:
    if isinstance(spec, Mapping):
        if beyond := [d for d in spec if d not in range(-x.ndim, x.ndim)]:
            raise OptionError(f"dynamic: {name} has {x.ndim} dimensions, got {beyond[0]!r}")
        if twice := [d for d in spec if d < 0 and d + x.ndim in spec]:
            raise OptionError(f"dynamic: {name}: expected each dimension once, got {twice[0]} and {twice[0] + x.ndim}")
        return {d % x.ndim: dim(size) for d, size in spec.items()}  # PyTorch ignores the names of those below 0
    if isinstance(spec, str) or (isinstance(spec, (list, tuple)) and any(isinstance(size, str) for size in spec)):
        raise OptionError(f"dynamic: {name}: expected sizes by their dimensions, as {{0: 'batch'}}, got {spec!r}")
    return spec


def _dim(size: object, dims: dict[str, Dim]) -> object:
    name, low, high = size if isinstance(size, tuple) and len(size) == 3 else (size, None, None)
    if not isinstance(name, str):
        return size
    if (low or 0) < 0 or (high is not None and high < (low or 0)):
        raise OptionError(f"dynamic: expected the least and the most of {name}, got {low} and {high}")
    multiple = MULTIPLE.fullmatch(name)
    if multiple is None and not name.isidentifier():
        raise OptionError(f"dynamic: expected a name, or a number times one, got {name!r}")
    if multiple is None:
        return dims.setdefault(name, Dim(name, min=low, max=high))
    step, name = int(multiple[1]), multiple[2]
    least, most = None if low is None else -(-low // step), None if high is None else high // step
    return step * dims.setdefault(name, Dim(name, min=least, max=most))  # type: ignore[operator]


def grown(given: dict[str, object], shapes: object) -> dict[str, object]:
    """Arguments to capture with: where the given ones have 0 or 1 of an open size, these have more. All sizes that come
    of that one grow alike."""
    if not isinstance(shapes, Mapping):
        return given
    sizes = [found for name, x in given.items() for found in _open(x, shapes.get(name))]
    small = {
        dim for size, dim in sizes for root in [_root(dim)] for n in (0, 1) if n >= root.min and _at(dim, n) == size
    }
    roots = {_root(dim) for _, dim in sizes} - {_root(dim) for _, dim in sizes if dim not in small}
    return {name: _grown(x, shapes.get(name), roots) for name, x in given.items()} if roots else given


def _open(x: object, spec: object) -> list[tuple[int, Any]]:
    """Every open size of a structure, with its `Dim`."""
    if isinstance(x, torch.Tensor):
        return [(x.shape[d], dim) for d, dim in _dims(spec) if isinstance(dim, Dim)]
    if pytree.is_leaf(x):
        return []
    return [found for member, part in _beside(x, spec) for found in _open(member, part)]


def _grown(x: object, spec: object, roots: set[Any]) -> object:
    if isinstance(x, torch.Tensor):
        wanted = {d: _larger(dim) for d, dim in _dims(spec) if isinstance(dim, Dim) and _root(dim) in roots}
        return _repeated(x, wanted) if wanted else x
    if pytree.is_leaf(x):
        return x
    return pytree.with_members(x, [_grown(member, part, roots) for member, part in _beside(x, spec)])


def _beside(x: object, spec: object) -> Iterable[tuple[object, object]]:
    return zip(pytree.members(x).values(), pytree.members(spec).values(), strict=True)


def _repeated(x: torch.Tensor, wanted: Mapping[int, int]) -> torch.Tensor:
    """The same numbers again and again, or zeros where there are none, in memory that lies in the same order."""
    shape = [wanted.get(d, size) for d, size in enumerate(x.shape)]
    strides, step = [0] * x.ndim, 1
    for d in sorted(range(x.ndim), key=lambda d: (x.stride(d), -d)):
        strides[d], step = step, step * shape[d]
    made = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
    one = x[tuple(slice(0, 1) if d in wanted else slice(None) for d in range(x.ndim))]
    return made.copy_(one.expand(shape)) if one.numel() else made.zero_()


def _root(dim: Any) -> Any:
    return getattr(dim, "root", dim)


def _at(dim: Any, n: int) -> int:
    """The size where the one that it comes of is n."""
    return dim.fn(n) if hasattr(dim, "fn") else n


def _larger(dim: Any) -> int:
    return _at(dim, min(GROWN, _root(dim).max))


def _dims(spec: object) -> Iterable[tuple[int, object]]:
    if isinstance(spec, Mapping):
        return spec.items()
    return enumerate(spec) if isinstance(spec, (list, tuple)) else ()
