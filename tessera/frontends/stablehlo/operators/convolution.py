"""Convolution in full: any layout, strides, padding (negative too), dilation of both sides, reversal, groups of both
kinds.

In: operands in the layouts that `dimension_numbers` says. Out: torch's convolution over (batch, features, space),
permuted back. Groups of the batch are groups of features once the batch is folded into them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.frontends.stablehlo.operators.convert import converted
from tessera.frontends.stablehlo.operators.shapes import padded
from tessera.frontends.stablehlo.operators.windows import windows
from tessera.frontends.stablehlo.registry import Site, meaning
from tessera.frontends.stablehlo.values import Splat, Value, integers, tensor_of


@meaning("convolution")
def convolution(site: Site, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    space = site.operand(0).rank - 2
    padding = site.get("padding") or [[0, 0]] * space
    return convolved(site, x, w, padding)


@meaning("dynamic_conv", raw=True)
def dynamic_conv(site: Site, x: Value, w: Value, padding: Value) -> torch.Tensor:
    flat = integers(padding, "padding")
    pairs = [flat[i : i + 2] for i in range(0, len(flat), 2)]
    return convolved(site, tensor_of(x, site.device), tensor_of(w, site.device), pairs)


def convolved(site: Site, x: torch.Tensor, w: torch.Tensor, padding: Sequence[Sequence[int]]) -> torch.Tensor:
    lhs, rhs, out = site["dimension_numbers"]
    space = len(padding)
    ones = [1] * space
    strides = list(site.get("window_strides") or ones)
    base_dilation, dilation = list(site.get("lhs_dilation") or ones), list(site.get("rhs_dilation") or ones)
    reversal = [i + 2 for i, r in enumerate(site.get("window_reversal") or ()) if r]
    element = site.element
    x = _ordered(converted(x, site.operand(0).element, element), lhs, "bf", space)
    w = _ordered(converted(w, site.operand(1).element, element), rhs, "oi", space)
    w = torch.flip(w, reversal) if reversal else w
    batches, groups = site.get("batch_group_count", 1), site.get("feature_group_count", 1)
    if batches > 1:
        x = x.unflatten(0, (batches, -1)).transpose(0, 1).flatten(1, 2)
        groups = batches
    simple = all(s == 1 for s in base_dilation) and all(a == b and a >= 0 for a, b in padding)
    if not simple:
        low, high = ([0, 0, *(p[i] for p in padding)] for i in (0, 1))
        x = padded(site, x, Splat(0, (), element), low, high, [0, 0, *(s - 1 for s in base_dilation)])
    edges = [p[0] for p in padding] if simple else [0] * space
    y = _convolve(site, x, w, strides, edges, dilation, groups)
    order = [_axis(out, d, "bf", space) for d in out]
    return element.wrap(y).permute(order)


def _axis(names: Sequence[object], name: object, ends: str, space: int) -> int:
    return ends.index(name) if isinstance(name, str) and name in ends else int(name) + 2  # type: ignore[call-overload]


def _ordered(x: torch.Tensor, names: Sequence[object], ends: str, space: int) -> torch.Tensor:
    """The two named dimensions first, then space in order."""
    return x.permute([list(names).index(d) for d in (*ends, *range(space))])


def _convolve(
    site: Site, x: torch.Tensor, w: torch.Tensor, strides: list[int], edges: list[int], dilation: list[int], groups: int
) -> torch.Tensor:
    space = x.ndim - 2
    if 1 <= space <= 3 and site.element.floating and all(n != 0 for n in (*x.shape, *w.shape)):
        run = (torch.conv1d, torch.conv2d, torch.conv3d)[space - 1]
        return run(x, w, None, strides, edges, dilation, groups)
    return _by_windows(site, x, w, strides, edges, dilation, groups)


def _by_windows(
    site: Site, x: torch.Tensor, w: torch.Tensor, strides: list[int], edges: list[int], dilation: list[int], groups: int
) -> torch.Tensor:
    """For numbers and spaces that torch does not convolve: windows as a view, then one product."""
    space = x.ndim - 2
    if any(edges):
        ends = [0, 0, *edges]
        x = padded(site, x, Splat(0, (), site.element), ends, ends, [0] * x.ndim)
    view = windows(x, [1, 1, *w.shape[2:]], [1, 1, *strides], [1, 1, *dilation])
    view = view.reshape(*view.shape[: x.ndim], *w.shape[2:])  # batch, features, places…, window…
    places = list(view.shape[2 : 2 + space])
    view = view.unflatten(1, (groups, -1))
    rows = view.permute(1, 0, *range(3, 3 + space), 2, *range(3 + space, 3 + 2 * space))
    rows = rows.reshape(groups, -1, w[0].numel())
    columns = w.unflatten(0, (groups, -1)).reshape(groups, -1, w[0].numel())
    out = torch.matmul(rows, columns.transpose(1, 2))  # group, batch and places, features of the group
    out = out.reshape(groups, x.shape[0], *places, -1)
    return out.permute(1, 0, out.ndim - 1, *range(2, 2 + space)).flatten(1, 2)
