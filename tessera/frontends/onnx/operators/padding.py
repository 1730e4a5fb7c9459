"""Padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.allocation import allowed
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.values import number, numbers

Tensor = torch.Tensor


def pad(x: Tensor, pads: list, axes: list[int] | None, mode: str, value: float, context: Context) -> Tensor:
    dims = [a % x.ndim for a in axes] if axes is not None else list(range(x.ndim))
    if len(pads) != 2 * len(dims):
        raise OnnxError(f"pads: expected {2 * len(dims)} numbers, got {len(pads)}")
    before = dict(zip(dims, pads[: len(dims)], strict=True))
    after = dict(zip(dims, pads[len(dims) :], strict=True))
    allowed([n + before.get(d, 0) + after.get(d, 0) for d, n in enumerate(x.shape)], x.element_size(), context)
    if mode == "constant":
        listed = [n for d in reversed(range(x.ndim)) for n in (before.get(d, 0), after.get(d, 0))]
        if x.dtype == torch.bool:
            return F.pad(x.to(torch.uint8), listed, value=int(bool(value))).to(torch.bool)
        return F.pad(x, listed, value=value)
    for d in dims:
        if before[d] or after[d]:
            x = x.index_select(d, _places(mode, before[d], x.shape[d], after[d], x.device))
    return x


def _places(mode: str, before: int, size: int, after: int, device: torch.device) -> Tensor:
    """Which element stands at each place along one dimension."""
    places = torch.arange(-before, size + after, device=device)
    if mode == "edge":
        return places.clamp(0, size - 1)
    if mode == "wrap":
        return torch.remainder(places, size)
    if mode == "reflect":
        if size == 1:
            return torch.zeros_like(places)
        turn = torch.remainder(places, 2 * (size - 1))
        return torch.where(turn < size, turn, 2 * (size - 1) - turn)
    raise OnnxError(f"mode: expected constant, edge, reflect or wrap, got {mode!r}")


@operator("Pad", 11, moves=True, sizes=(1, 2, 3))
def pad_by_input(
    x: Tensor,
    pads: Tensor,
    value: Tensor | None = None,
    axes: Tensor | None = None,
    *,
    mode: str = "constant",
    context: Context,
) -> Tensor:
    fill = 0 if value is None else number(value)
    return pad(x, numbers(pads), None if axes is None else numbers(axes), mode, fill, context)


@operator("Pad", 2, 10)
def pad_by_attribute(
    x: Tensor, *, pads: list[int], mode: str = "constant", value: float = 0.0, context: Context
) -> Tensor:
    return pad(x, pads, None, mode, value, context)


@operator("Pad", 1, 1)
def pad_of_first_opset(
    x: Tensor, *, paddings: list[int], mode: str = "constant", value: float = 0.0, context: Context
) -> Tensor:
    return pad(x, paddings, None, mode, value, context)
