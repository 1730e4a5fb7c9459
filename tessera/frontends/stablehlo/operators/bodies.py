"""Regions over scalars: what a body is, if it is one that torch has, and running it over whole tensors otherwise.

A body of elementwise operations means the same on tensors of any shape, so it runs once for all elements. Any other
body runs element by element.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from tessera.frontends.stablehlo.elements import Quantized
from tessera.frontends.stablehlo.module import Block, Operation, Tensor
from tessera.frontends.stablehlo.registry import TABLE, Site
from tessera.frontends.stablehlo.values import Value, broadcast_shape, tensor_of
from tessera.torch_internals.dispatch import disable_current_modes

_COMMUTES = {"add", "multiply", "maximum", "minimum", "and", "or", "xor"}


def kind(block: Block) -> str | None:
    """`add`, `multiply`, `maximum`, …: the one operation on both arguments that the body is; `second` if it gives the
    second argument back."""
    if len(block.arguments) != 2 or len(block.returns) != 1:
        return None
    if any(isinstance(t, Tensor) and isinstance(t.element, Quantized) for t in block.types):
        return None
    first, second = block.arguments
    operations = {o.results[0]: o for o in block.operations if len(o.results) == 1}
    operation = operations.get(block.returns[0])
    if operation is None:
        return "second" if block.returns == (second,) else None
    name = operation.name.removeprefix("stablehlo.")
    return name if name in _COMMUTES and set(operation.operands) == {first, second} else None


def fingerprint(block: Block) -> tuple[str, ...]:
    """What the body computes, as text: equal bodies have equal ones, whatever their values are called."""
    names: dict[int, str] = {a: f"%{i}" for i, a in enumerate(block.arguments)}
    for operation in block.operations:
        text = _written(operation, names)
        names.update({r: f"{text}#{i}" if i else text for i, r in enumerate(operation.results)})
    return tuple(names.get(i, "?") for i in block.returns)


def _written(operation: Operation, names: dict[int, str]) -> str:
    with disable_current_modes():  # the numbers of a constant, while a program is recorded, too
        said = [str(v.tolist() if isinstance(v, torch.Tensor) else v) for _, v in sorted(operation.attributes.items())]
    operands = [names.get(i, f"outer{i}") for i in operation.operands]
    name = operation.name.removeprefix("stablehlo.")
    if name in _COMMUTES:
        operands.sort()
    return f"{name}({', '.join([*operands, *said])})"


def vectorises(block: Block) -> bool:
    """Whether every operation acts on each element alone."""
    return all(
        o.name == "stablehlo.constant" or (o.name in TABLE and TABLE[o.name].elementwise and not o.regions)
        for o in block.operations
    )


def over_elements(site: Site, place: int = 0) -> Callable[..., list[torch.Tensor]]:
    """A region over scalars as a function over tensors of one shape."""
    block = site.region(place)

    def whole(*xs: torch.Tensor) -> list[torch.Tensor]:
        shape = broadcast_shape([x.shape for x in xs])
        out = site.machine.block(block, xs)
        return [tensor_of(v, site.device).expand(shape) for v in out]

    def each(*xs: torch.Tensor) -> list[torch.Tensor]:
        shape = broadcast_shape([x.shape for x in xs])
        rows = []
        for index in itertools.product(*map(range, shape)):
            out = site.machine.block(block, [x.expand(shape)[index] for x in xs])
            rows.append([tensor_of(v, site.device) for v in out])
        count = len(block.returns)
        if not rows:
            return [torch.empty(shape, dtype=_held(block, i), device=site.device) for i in range(count)]
        return [torch.stack([row[i] for row in rows]).reshape(shape) for i in range(count)]

    return whole if vectorises(block) else each


def _held(block: Block, place: int) -> torch.dtype:
    types = {r: t for o in block.operations for r, t in zip(o.results, o.result_types, strict=True)}
    types |= dict(zip(block.arguments, block.types, strict=True))
    return types[block.returns[place]].element.held  # type: ignore[union-attr]


def fold(
    body: Callable[..., list[torch.Tensor]], inits: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The body over all slices along dimension 0, in pairs, pairs of pairs and so on; the initial values come first.

    Slices keep their order, so a body that is associative and does not commute is folded right.
    """
    values = list(rows)
    shape = values[0].shape[1:]
    if not values[0].shape[0]:
        return [i.expand(shape) for i in inits]
    while (count := values[0].shape[0]) > 1:
        pairs = count // 2
        left, right = [x[0 : 2 * pairs : 2] for x in values], [x[1 : 2 * pairs : 2] for x in values]
        joined = body(*left, *right)
        if count % 2:
            joined = [torch.cat([j, x[-1:]]) for j, x in zip(joined, values, strict=True)]
        values = joined
    return body(*(i.expand(shape) for i in inits), *(x[0] for x in values))


Values = Sequence[Value]
