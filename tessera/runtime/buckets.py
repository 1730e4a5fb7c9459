"""Inputs of changing sizes, padded to a few.

In: a function, and a `Buckets` that says which dimension of which arguments changes, and which dimension of which
results goes with it. Out: the same function over padded arguments: each call is padded to the next size of the list,
and its results are cut back. Few sizes means few compiled programs and CUDA graphs. Whether padding leaves the wanted
part of the results alone (a causal model does) is for the caller to say, by asking for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from tessera.torch_internals import pytree
from tessera.util.errors import InputError, OptionError


@dataclass(frozen=True)
class Buckets:
    """`inputs` maps an argument, by position or name, to its dimension; `outputs` a result's position to its own."""

    sizes: tuple[int, ...]
    inputs: Mapping[int | str, int]
    outputs: Mapping[int, int] = field(default_factory=dict)
    fill: float = 0

    def __post_init__(self) -> None:
        if not self.sizes or any(not isinstance(s, int) or s < 1 for s in self.sizes) or not self.inputs:
            raise OptionError(f"expected sizes of at least 1 and some inputs, got {self.sizes!r} and {self.inputs!r}")

        if wrong := [key for key in (*self.inputs, *self.outputs) if isinstance(key, int) and key < 0]:
            raise OptionError(f"expected positions of arguments and results from 0 on, got {wrong[0]}")

    def size_for(self, size: int) -> int:
        """The least listed size that holds this one; beyond the list a size stays as it is."""
        return min((s for s in self.sizes if s >= size), default=size)


def bucketed(call: Callable, buckets: Buckets, names: tuple[str, ...]) -> Callable:
    """The function over padded arguments; `names` are those of its arguments, in order."""

    @functools.wraps(call)
    def run(*args: object, **kwargs: object) -> object:
        dims = _places(buckets, names, args, kwargs)
        size = _size(buckets, dims, args, kwargs)
        wanted = buckets.size_for(size)
        if wanted == size:
            return call(*args, **kwargs)
        padded = [_pad(x, dims.get(i), wanted, buckets.fill) for i, x in enumerate(args)]
        named = {k: _pad(x, dims.get(k), wanted, buckets.fill) for k, x in kwargs.items()}
        leaves, spec = pytree.tree_flatten(call(*padded, **named))
        for position, dim in buckets.outputs.items():
            _check_result(leaves, position, dim, wanted)
            leaves[position] = leaves[position].narrow(dim, 0, size)
        return pytree.tree_unflatten(leaves, spec)

    return run


def _places(buckets: Buckets, names: tuple[str, ...], args: tuple, kwargs: dict) -> dict[int | str, int]:
    """Where the padded arguments of this call stand, and their dimensions: any may come by position or by name."""
    dims: dict[int | str, int] = {}
    for key, dim in buckets.inputs.items():
        if isinstance(key, str):
            place = key if key in kwargs or key not in names else names.index(key)
        else:
            place = key if key < len(args) or key >= len(names) else names[key]
        x = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
        if isinstance(x, torch.Tensor):
            if not -x.ndim <= dim < x.ndim:
                raise InputError(f"Buckets: expected a dimension of argument {key}, {tuple(x.shape)}, got {dim}")
            dims[place] = dim
    return dims


def _size(buckets: Buckets, dims: dict[int | str, int], args: tuple, kwargs: dict) -> int:
    sizes = {at: (kwargs[at] if isinstance(at, str) else args[at]).shape[dim] for at, dim in dims.items()}
    if not sizes:
        raise InputError(f"expected tensors as the arguments {list(buckets.inputs)}, found none of them")
    if len(set(sizes.values())) > 1:
        raise InputError(f"expected one size along the padded dimensions, got {sizes}")
    return next(iter(sizes.values()))


def _pad(x: object, dim: int | None, size: int, fill: float) -> object:
    if dim is None or not isinstance(x, torch.Tensor):
        return x
    widths = [0, 0] * (x.ndim - 1 - dim % x.ndim) + [0, size - x.shape[dim]]
    return torch.nn.functional.pad(x, widths, value=fill)


def _check_result(results: list, position: int, dim: int, size: int) -> None:
    """Only a tensor that is as long as what was padded can be cut back."""
    x = results[position] if position < len(results) else None
    if not isinstance(x, torch.Tensor):
        what = f"{type(x).__name__}" if position < len(results) else f"{len(results)} results"
        raise InputError(f"Buckets: expected a tensor as result {position}, got {what}")
    if not -x.ndim <= dim < x.ndim or x.shape[dim] != size:
        raise InputError(
            f"Buckets: expected result {position} to have the padded size {size} along dimension {dim}, got a tensor "
            f"of shape {tuple(x.shape)}"
        )
