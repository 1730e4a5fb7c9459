"""Complex numbers, which runtimes have no arithmetic of: real and imaginary parts side by side, in a last dimension.

Forms whose names begin with `complex.` are asked where an operand or the result is complex, and no others. Shapes of
complex values are those of the program; the dimension of the parts is behind them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tessera.exporters.onnx.forms.common import axes, axis, need
from tessera.exporters.onnx.graph import INT64_MAX, Graph, Ref, real_parts, same
from tessera.exporters.onnx.registry import form
from tessera.ir.types import Size


def part(g: Graph, x: Ref, which: int) -> Ref:
    """The real or the imaginary parts."""
    if not x.dtype.is_complex:
        return x if which == 0 else g.expand(g.full(0, x.dtype), x.sizes)
    out = g.op("Gather", x, g.full(which, torch.int64), axis=-1)
    return Ref(out.name, x.dtype.to_real(), x.shape)


def joined(g: Graph, real: Ref, imaginary: Ref, shape: Sequence[Size]) -> Ref:
    last = g.ints([-1])
    both = g.op("Concat", g.op("Unsqueeze", real, last), g.op("Unsqueeze", imaginary, last), axis=-1)
    return Ref(both.name, g.result.dtype, tuple(shape))


@form("complex.complex")
def complex_(g: Graph, real: Ref, imaginary: Ref) -> Ref:
    shape = g.result.shape
    return joined(g, g.expand(real, shape), g.expand(imaginary, shape), shape)


@form("complex.polar")
def polar(g: Graph, size: Ref, angle: Ref) -> Ref:
    shape = g.result.shape
    size, angle = g.expand(size, shape), g.expand(angle, shape)
    return joined(g, g.op("Mul", size, g.op("Cos", angle)), g.op("Mul", size, g.op("Sin", angle)), shape)


@form("complex.view_as_complex complex.view_as_complex_copy complex.view_as_real complex.view_as_real_copy")
def parts_are_there(g: Graph, x: Ref) -> Ref:
    return Ref(x.name, g.result.dtype, g.result.shape)


@form("complex.real")
def real(g: Graph, x: Ref) -> Ref:
    return part(g, x, 0)


@form("complex.imag")
def imag(g: Graph, x: Ref) -> Ref:
    return part(g, x, 1)


@form("complex.alias complex.detach complex.clone complex.contiguous complex.resolve_conj complex.resolve_neg")
def identity(g: Graph, x: Ref, *_: object, **__: object) -> Ref:
    return x


@form("complex._to_copy complex.to.dtype complex.prims.convert_element_type")
def to(g: Graph, x: Ref, *_: object, **__: object) -> Ref:
    need(g.result.dtype.is_complex)
    if x.dtype.is_complex:
        need(x.dtype == g.result.dtype)
        return x
    wide = g.cast(x, g.result.dtype.to_real())
    return joined(g, wide, part(g, wide, 1), x.sizes)


@form("complex._conj complex.conj complex._conj_physical complex.conj_physical")
def conj(g: Graph, x: Ref) -> Ref:
    return Ref(g.op("Mul", real_parts(x), g.tensor(torch.tensor([1.0, -1.0]))).name, x.dtype, x.shape)


@form("complex.neg")
def neg(g: Graph, x: Ref) -> Ref:
    return Ref(g.op("Neg", real_parts(x)).name, x.dtype, x.shape)


@form("complex.sum")
def sum_(g: Graph, x: Ref, dims: object = None, keepdim: bool = False, **_: object) -> Ref:
    need(x.dtype == g.result.dtype and x.ndim > 0)
    out = g.reduce("ReduceSum", real_parts(x), axes(dims, x.ndim) or list(range(x.ndim)), keepdim)
    return Ref(out.name, x.dtype, g.result.shape)


@form("complex.abs")
def abs_(g: Graph, x: Ref) -> Ref:
    return g.op("Sqrt", g.reduce("ReduceSumSquare", real_parts(x), [len(x.sizes)], False))


# --- views ---


@form("complex.view.default complex.reshape complex._unsafe_view complex.flatten complex.squeeze complex.prims.squeeze")
def view(g: Graph, x: Ref, *_: object, **__: object) -> Ref:
    return Ref(g.reshape(real_parts(x), [*g.result.shape, 2]).name, x.dtype, g.result.shape)


@form("complex.unsqueeze")
def unsqueeze(g: Graph, x: Ref, dim: int) -> Ref:
    return Ref(g.unsqueeze(real_parts(x), axis(dim, x.ndim + 1)).name, x.dtype, g.result.shape)


@form("complex.transpose.int complex.permute")
def permute(g: Graph, x: Ref, *dims: object) -> Ref:
    order = list(range(x.ndim))
    if len(dims) == 1:
        order = [axis(d, x.ndim) for d in dims[0]]  # type: ignore[union-attr,attr-defined]
    else:
        a, b = (axis(d, x.ndim) for d in dims)  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    return Ref(g.permute(real_parts(x), [*order, x.ndim]).name, x.dtype, g.result.shape)


@form("complex.expand")
def expand(g: Graph, x: Ref, *_: object, **__: object) -> Ref:
    return Ref(g.expand(real_parts(x), [*g.result.shape, 2]).name, x.dtype, g.result.shape)


@form("complex.slice.Tensor")
def slice_(g: Graph, x: Ref, dim: int = 0, start: object = None, end: object = None, step: int = 1) -> Ref:
    out = g.slice(real_parts(x), axis(dim, x.ndim), start or 0, INT64_MAX if end is None else end, step)
    return Ref(out.name, x.dtype, g.result.shape)


@form("complex.select.int")
def select(g: Graph, x: Ref, dim: int, index: object) -> Ref:
    out = g.op("Gather", real_parts(x), g.scalar(index, torch.int64), axis=axis(dim, x.ndim))
    return Ref(out.name, x.dtype, g.result.shape)


@form("complex.cat")
def cat(g: Graph, tensors: Sequence[Ref], dim: int = 0) -> Ref:
    need(all(x.dtype == g.result.dtype and x.ndim == len(g.result.shape) for x in tensors))
    out = g.op("Concat", *map(real_parts, tensors), axis=axis(dim, len(g.result.shape)))
    return Ref(out.name, g.result.dtype, g.result.shape)


@form("complex.constant_pad_nd")
def constant_pad(g: Graph, x: Ref, pad: Sequence[int], value: object = 0) -> Ref:
    count = len(pad) // 2
    low, high = list(pad[0::2])[::-1], list(pad[1::2])[::-1]
    lead = [0] * (x.ndim - count)
    out = g.op("Pad", real_parts(x), g.ints([*lead, *low, 0, *lead, *high, 0]), mode="constant")
    return Ref(out.name, x.dtype, g.result.shape)


# --- Fourier transforms ---

_SCALED = {0: 0.0, 1: -0.5, 2: -1.0}  # norms: none, by the root of the size, by the size


def transformed(g: Graph, x: Ref, dim: int, inverse: bool, onesided: bool = False) -> Ref:
    """One dimension; ONNX divides by the size on the way back, PyTorch where it says so."""
    about: dict[str, Any] = {"inverse": int(inverse), "onesided": int(onesided)}
    if g.opset >= 20:
        return g.op("DFT", x, None, g.full(dim, torch.int64), **about)
    return g.op("DFT", x, axis=dim, **about)


def _normed(g: Graph, x: Ref, sizes: Sequence[Size], norm: int, divided: bool) -> Ref:
    count, exponent = math.prod(sizes), _SCALED[norm] + (1.0 if divided else 0.0)
    if not exponent:
        return x
    if isinstance(count, int):
        return g.op("Mul", x, g.full(count**exponent, x.dtype))
    return g.op("Mul", x, g.op("Pow", g.scalar(count, x.dtype), g.full(exponent, x.dtype)))


@form("complex._fft_c2c")
def fft_c2c(g: Graph, x: Ref, dims: Sequence[int], norm: int, forward: bool) -> Ref:
    need(x.dtype == torch.complex64 and not any(same(n, 0) for n in x.sizes))
    out = real_parts(x)
    for d in dims:
        out = transformed(g, out, axis(d, x.ndim), not forward)
    out = _normed(g, out, [x.sizes[d] for d in dims], norm, not forward)
    return Ref(out.name, x.dtype, x.shape)


@form("complex._fft_r2c")
def fft_r2c(g: Graph, x: Ref, dims: Sequence[int], norm: int, onesided: bool) -> Ref:
    need(x.dtype == torch.float32)
    out = g.op("Unsqueeze", x, g.ints([-1]))
    last = axis(dims[-1], x.ndim)
    out = transformed(g, out, last, False, onesided)
    for d in dims[:-1]:
        out = transformed(g, out, axis(d, x.ndim), False)
    out = _normed(g, out, [x.sizes[d] for d in dims], norm, False)
    return Ref(out.name, g.result.dtype, g.result.shape)


@form("complex._fft_c2r")
def fft_c2r(g: Graph, x: Ref, dims: Sequence[int], norm: int, size: Size) -> Ref:
    """The half that is missing is the other one, mirrored and conjugated."""
    need(x.dtype == torch.complex64)
    last = axis(dims[-1], x.ndim)
    out = real_parts(x)
    for d in dims[:-1]:
        out = transformed(g, out, axis(d, x.ndim), True)
    half: Any = size // 2 + 1  # type: ignore[operator]
    kept = g.slice(out, last, 0, half)
    if not isinstance(size, int) or size > 2:
        mirrored = g.op("Slice", kept, g.ints([size - half]), g.ints([0]), g.ints([last]), g.ints([-1]))
        mirrored = g.op("Mul", mirrored, g.tensor(torch.tensor([1.0, -1.0])))
        kept = g.op("Concat", kept, mirrored, axis=last)
    out = transformed(g, kept, last, True)
    real_ = g.op("Gather", out, g.full(0, torch.int64), axis=-1)
    sizes = [*(x.sizes[d] for d in dims[:-1]), size]
    return _normed(g, real_, sizes, norm, True)
