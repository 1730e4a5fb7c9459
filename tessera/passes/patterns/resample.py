"""Gradients of linear interpolation as products.

In: a trace. Out: the same program, where the gradient of `upsample_bilinear2d` and its like is a product with a matrix
of weights along each dimension. Interpolation is linear, each dimension for itself: the matrices are small. A library
adds every element to its neighbours by atomics: 28 ms of a segmentation model's step on an H200, where the bytes take
0.4 ms. Products read them once, add in float32, and always in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.ir.types import Size, size_hint
from tessera.machines import machine_of
from tessera.ops.families import cast, product

GRADIENTS = ("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_trilinear3d_backward")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = ("cuda",)
ATOMICS = 7.84  # cycles of a multiprocessor for an element of the cotangent, by the library: 30 ps on an H200
SHARE = 0.3  # of the peak that long, narrow products reach
LAUNCHES = 5  # of kernels, whose time is to be saved at least


@dataclass(frozen=True)
class Gradient:
    """What one equation computes. `order` are the dimensions as they lie in memory, the outermost first."""

    cotangent: Value
    outside: tuple[int, ...]  # sizes of the image that was made
    inside: tuple[int, ...]  # and of the one it was made of
    corners: bool
    scales: tuple[float | None, ...]
    order: tuple[int, ...]

    def pays(self) -> bool:
        ct = self.cotangent.tensor
        count = size_hint(ct.numel())
        machine = machine_of(ct.device)
        rate = machine.flops if ct.dtype is torch.float32 else machine.matrix_flops
        along = self.along()[0]
        products = 2 * 2 * count * self.inside[along] / (SHARE * rate)  # the others are of less than the first made
        written = 2 * ct.nbytes() / machine.bandwidth
        return count * ATOMICS / machine.cycles > products + written + LAUNCHES * machine.launch

    def along(self) -> list[int]:
        """Which dimension is reduced first: the innermost, if it is one of the image's; else the outermost, whose rows
        are the longest."""
        image = [d - 2 for d in self.order if d >= 2]
        return image[::-1] if self.order[-1] >= 2 else image


def resample(trace: Trace) -> Trace:
    """Gradients of interpolations as products, where that pays."""
    if not any(eqn.opname in GRADIENTS for eqn in trace.equations):
        return trace
    rewrite = Rewrite(trace)
    for eqn in rewrite:
        gradient = _gradient(eqn) if eqn.opname in GRADIENTS else None
        if gradient is not None and gradient.pays():
            rewrite.replace(eqn, functools.partial(_products, gradient))
    return rewrite.finish()


def _gradient(eqn: Equation) -> Gradient | None:
    (ct, outside, shape, corners, *scales), _ = eqn.bound()
    assert isinstance(ct, Value)
    device, dtype = ct.tensor.device, ct.dtype
    rounds = dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32  # a user said so of products alone
    static = all(type(n) is int for n in (*outside, *shape[2:]))  # type: ignore[misc, index]
    if device.type not in DEVICES or dtype not in DTYPES or rounds or not static:
        return None
    strides = [size_hint(s) for s in eqn.out.tensor.stride]
    order = tuple(sorted(range(ct.ndim), key=lambda d: (-strides[d], d)))
    return Gradient(ct, tuple(outside), tuple(shape[2:]), bool(corners), tuple(scales), order)  # type: ignore[arg-type, index]


def _products(gradient: Gradient, eqn: Equation) -> Value:
    """One dimension after another, over the cotangent as its result will lie in memory."""
    order = gradient.order
    ct = aten.clone(aten.permute(gradient.cotangent, list(order)), memory_format=torch.contiguous_format)
    for d in gradient.along():
        weights = _weights(gradient, d)
        ct = _contracted(ct, order.index(d + 2), cast(weights, ct.dtype))
    return aten.permute(ct, [order.index(d) for d in range(len(order))])


def _contracted(x: Value, dim: int, weights: Value) -> Value:
    """`x` along one dimension by a matrix, without a copy."""
    before, after = product(x.shape[:dim]), product(x.shape[dim + 1 :])
    many, few = weights.shape
    shape: Sequence[Size] = [*x.shape[:dim], few, *x.shape[dim + 1 :]]
    if dim == x.ndim - 1:
        return aten.view(aten.mm(aten.view(x, [before, many]), weights), shape)
    rows = aten.expand(aten.unsqueeze(aten.t(weights), 0), [before, few, many])
    return aten.view(aten.bmm(rows, aten.view(x, [before, many, after])), shape)


def _weights(gradient: Gradient, d: int) -> Value:
    """How much of each element inside is in each one outside: [outside, inside]."""
    device = gradient.cotangent.tensor.device
    many, few = gradient.outside[d], gradient.inside[d]
    step = _step(many, few, gradient.corners, gradient.scales[d])
    place = aten.arange(many, dtype=torch.float32, device=device)
    place = (
        aten.mul(place, step)
        if gradient.corners
        else aten.clamp(aten.sub(aten.mul(aten.add(place, 0.5), step), 0.5), 0)
    )
    left = aten.clamp(aten.floor(place), None, few - 1)
    share = aten.unsqueeze(aten.clamp(aten.sub(place, left), 0, 1), 1)
    left, inside = aten.unsqueeze(left, 1), aten.arange(few, dtype=torch.float32, device=device)
    right = aten.clamp(aten.add(left, 1), None, few - 1)
    of_left = aten.mul(aten.eq(inside, left), aten.rsub(share, 1))
    return aten.add(of_left, aten.mul(aten.eq(inside, right), share))


def _step(many: int, few: int, corners: bool, scale: float | None) -> float:
    """From one element outside to the next, in elements inside."""
    if corners:
        return (few - 1) / (many - 1) if many > 1 else 0.0
    return 1 / scale if scale else few / many
