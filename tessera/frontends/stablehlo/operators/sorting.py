"""Sorting by any comparison.

A comparison of one key of each side (`key(a) < key(b)`) sorts by torch. Any other is asked about all pairs of two
halves at a time: a bitonic network, in which the places decide between elements that the comparison does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tessera.frontends.stablehlo import unsigned64
from tessera.frontends.stablehlo.elements import Element
from tessera.frontends.stablehlo.module import Block, Operation, Tensor
from tessera.frontends.stablehlo.operators import bodies
from tessera.frontends.stablehlo.operators.bodies import fingerprint
from tessera.frontends.stablehlo.operators.compare import total_order
from tessera.frontends.stablehlo.registry import Site, meaning
from tessera.frontends.stablehlo.values import tensor_of


@meaning("sort", storage=True)
def sort(site: Site, *xs: torch.Tensor) -> list[torch.Tensor]:
    dim = site.get("dimension", xs[0].ndim - 1)
    if not xs[0].ndim or xs[0].shape[dim] <= 1:
        return list(xs)
    dim = dim % xs[0].ndim
    ranked = _by_key(site, xs)
    if ranked is not None:
        key, descending = ranked
        order = torch.argsort(key, dim=dim, descending=descending, stable=True)
        return [torch.gather(x, dim, order) for x in xs]
    rows = [x.movedim(dim, 0) for x in xs]
    compare = bodies.over_elements(site)
    order = network(rows, lambda a, b: compare(*(v for pair in zip(a, b, strict=True) for v in pair))[0])
    return [torch.gather(x, 0, order).movedim(0, dim) for x in rows]


def _by_key(site: Site, xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool] | None:
    """The key and the direction, where the comparison is of the same function of both sides."""
    block = site.region()
    makers = {r: o for o in block.operations for r in o.results}
    last = makers.get(block.returns[0])
    if last is None or last.name != "stablehlo.compare" or not bodies.vectorises(block):
        return None
    direction = last.attributes["comparison_direction"]
    left, right = (fingerprint(_giving(block, i))[0] for i in last.operands)
    mine = [i for i in range(0, len(block.arguments), 2) if f"%{i}" in left.replace(f"%{i}0", "")]
    if direction not in ("LT", "GT") or len(mine) != 1:
        return None
    (place,) = mine
    if left.replace(f"%{place}", "%x") != right.replace(f"%{place + 1}", "%x") or f"%{place}" in right:
        return None
    given = [xs[i // 2] for i in range(len(block.arguments))]
    (key,) = site.machine.block(_giving(block, last.operands[0]), given)
    type_ = last.operand_types[0]
    assert isinstance(type_, Tensor)
    key = orderable(tensor_of(key, site.device), type_.element, last)
    return None if key is None else (key.expand(xs[0].shape), direction == "GT")


def orderable(key: torch.Tensor, element: Element, last: Operation) -> torch.Tensor | None:
    """Numbers that torch sorts as the comparison orders these."""
    if element.unsigned64:
        return unsigned64.ordered(key)
    if element.floating and last.attributes.get("compare_type") == "TOTALORDER":
        return total_order(key)
    return None if element.kind == "complex" else key


def _giving(block: Block, value: int) -> Block:
    return Block(block.arguments, block.types, block.operations, (value,))


def network(rows: Sequence[torch.Tensor], before: Callable[[list, list], torch.Tensor]) -> torch.Tensor:
    """The order along dimension 0 that a comparison gives, stable. Rows are padded to a power of two; the ones more
    come last."""
    count = rows[0].shape[0]
    size = 1 << (count - 1).bit_length()
    shape = [1] * rows[0].ndim
    shape[0] = size
    order = torch.arange(size, device=rows[0].device).reshape(shape).expand(size, *rows[0].shape[1:])
    position = torch.arange(size, device=rows[0].device)
    width = 2
    while width <= size:
        step = width // 2
        while step:
            order = _exchange(rows, order, position, width, step, count, before)
            step //= 2
        width *= 2
    return order[:count]


def _exchange(
    rows: Sequence[torch.Tensor], order: torch.Tensor, position: torch.Tensor, width: int, step: int, count: int,
    before: Callable,
) -> torch.Tensor:  # fmt: skip
    """Every element meets the one `step` away; both stay or change places."""
    other = order[position ^ step]
    mine, theirs = ([torch.gather(x, 0, o.clamp(max=count - 1)) for x in rows] for o in (order, other))
    first = before(mine, theirs)
    second = before(theirs, mine)
    tied = first == second
    comes_first = torch.where(tied, order < other, first)
    comes_first = torch.where(order >= count, (other >= count) & (order < other), comes_first | (other >= count))
    shape = [-1] + [1] * (order.ndim - 1)
    lower = ((position & step) == 0).reshape(shape)
    ascending = ((position & width) == 0).reshape(shape)
    keeps = comes_first == (lower == ascending)
    return torch.where(keeps, order, other)
