"""Products that sum: dot_general in full, dot, and einsum's older forms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tessera.frontends.stablehlo.elements import Element
from tessera.frontends.stablehlo.operators.convert import converted
from tessera.frontends.stablehlo.operators.shapes import reshaped
from tessera.frontends.stablehlo.registry import Site, meaning
from tessera.frontends.stablehlo.sizes import one_size


@meaning("dot_general")
def dot_general(site: Site, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dims = site["dot_dimension_numbers"]
    return contracted(
        site, a, b,
        dims.get("lhs_batching_dimensions", []), dims.get("rhs_batching_dimensions", []),
        dims.get("lhs_contracting_dimensions", []), dims.get("rhs_contracting_dimensions", []),
    )  # fmt: skip


@meaning("dot")
def dot(site: Site, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return contracted(site, a, b, [], [], [a.ndim - 1], [0])


@meaning("einsum")
def einsum(site: Site, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.einsum(site["einsum_config"], a, b)


@meaning("unary_einsum")
def unary_einsum(site: Site, a: torch.Tensor) -> torch.Tensor:
    return torch.einsum(site["einsum_config"], a)


def contracted(
    site: Site,
    a: torch.Tensor,
    b: torch.Tensor,
    a_batch: Sequence[int],
    b_batch: Sequence[int],
    a_sum: Sequence[int],
    b_sum: Sequence[int],
) -> torch.Tensor:
    """Batch dimensions, then what is left of `a`, then what is left of `b`."""
    for i, j in (*zip(a_batch, b_batch, strict=True), *zip(a_sum, b_sum, strict=True)):
        one_size(a.shape[i], b.shape[j])
    element = site.element
    a = _operand(a, site.operand(0).element, element)
    b = _operand(b, site.operand(1).element, element)
    a_free = [d for d in range(a.ndim) if d not in a_batch and d not in a_sum]
    b_free = [d for d in range(b.ndim) if d not in b_batch and d not in b_sum]
    if element.kind == "bool":
        return contracted_bools(a, b, a_batch, b_batch, a_sum, b_sum, a_free, b_free)
    out = element.wrap(_matmul(a, b, a_batch, b_batch, a_sum, b_sum, a_free, b_free))
    return out


def _operand(x: torch.Tensor, given: Element, wanted: Element) -> torch.Tensor:
    return converted(x, given, wanted) if given.held != wanted.held else x


def _matmul(a, b, a_batch, b_batch, a_sum, b_sum, a_free, b_free) -> torch.Tensor:  # noqa: ANN001
    """As one matmul. A last dimension that sums over the weight's first or last, without batches, is a layer."""
    shape = [a.shape[d] for d in (*a_batch, *a_free)] + [b.shape[d] for d in b_free]
    if a.is_complex() and _few([a.shape[d] for d in a_sum]):
        return _sum_of_products(
            a.permute(*a_sum, *a_batch, *a_free), b.permute(*b_sum, *b_batch, *b_free), a_batch, a_sum
        )
    if not a_batch and len(a_sum) == 1 and a_sum[0] == a.ndim - 1 and b.ndim == 2 and a.ndim >= 2:
        return torch.matmul(a, b if b_sum[0] == 0 else b.t())
    if _stacked(a_batch, a_sum, a_free, a.ndim) and _stacked(b_batch, b_sum, b_free, b.ndim):
        left = a if a_sum[0] == a.ndim - 1 else a.transpose(-1, -2)
        right = b if b_sum[0] == b.ndim - 2 else b.transpose(-1, -2)
        return torch.matmul(left, right)
    batch = [a.shape[d] for d in a_batch]
    rows, columns = ([x.shape[d] for d in free] for x, free in ((a, a_free), (b, b_free)))
    inner = [a.shape[d] for d in a_sum]
    left = reshaped(a.permute(*a_batch, *a_free, *a_sum), [*batch, math.prod(rows), math.prod(inner)])
    right = reshaped(b.permute(*b_batch, *b_sum, *b_free), [*batch, math.prod(inner), math.prod(columns)])
    return reshaped(torch.matmul(left, right), shape)


FEW = 16


def _few(sizes: Sequence[int]) -> bool:
    return all(type(n) is int for n in sizes) and 0 < math.prod(sizes) <= FEW


def _sum_of_products(a: torch.Tensor, b: torch.Tensor, batch: Sequence[int], summed: Sequence[int]) -> torch.Tensor:
    """Few products of complex numbers, one after another: libraries round their parts otherwise."""
    a, b = a.flatten(0, len(summed) - 1), b.flatten(0, len(summed) - 1)
    rows, columns = a.ndim - 1 - len(batch), b.ndim - 1 - len(batch)
    a = a.reshape(*a.shape, *[1] * columns)
    b = b.reshape(*b.shape[: 1 + len(batch)], *[1] * rows, *b.shape[1 + len(batch) :])
    total = a[0] * b[0]
    for k in range(1, a.shape[0]):
        total = total + a[k] * b[k]
    return total


def _stacked(batch: Sequence[int], summed: Sequence[int], free: Sequence[int], rank: int) -> bool:
    """Batches in front, in order, then one free and one summed dimension, in any order."""
    return list(batch) == list(range(rank - 2)) and len(summed) == 1 and len(free) == 1


def contracted_bools(a, b, a_batch, b_batch, a_sum, b_sum, a_free, b_free) -> torch.Tensor:  # noqa: ANN001
    """Of truth values: whether any pair is true in both."""
    return _matmul(a.float(), b.float(), a_batch, b_batch, a_sum, b_sum, a_free, b_free) > 0.5
