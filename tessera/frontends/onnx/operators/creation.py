"""Tensors made of nothing: constants, ranges, random numbers, windows."""

from __future__ import annotations

import math

import numpy as np
import torch

from tessera.frontends.onnx import elements
from tessera.frontends.onnx.elements import DTYPES, code_of
from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.allocation import allowed
from tessera.frontends.onnx.operators.casts import cast_to
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.values import literal, number, numbers

Tensor = torch.Tensor


@operator("Constant")
def constant(
    *,
    value: object = None,
    sparse_value: object = None,
    value_int: int | None = None,
    value_ints: list[int] | None = None,
    value_float: float | None = None,
    value_floats: list[float] | None = None,
    value_string: str | None = None,
    value_strings: list[str] | None = None,
    context: Context,
) -> object:
    if value is not None or sparse_value is not None:
        return context.interpreter.constant(value if value is not None else sparse_value)
    if value_string is not None or value_strings is not None:
        return np.array(value_string if value_strings is None else value_strings, dtype=object)
    whole = value_int if value_ints is None else value_ints
    if whole is not None:
        return literal(whole, torch.int64)
    return literal(value_float if value_floats is None else value_floats, torch.float32)


@operator("ConstantOfShape", 9, sizes=(0,))
def constant_of_shape(shape: Tensor, *, value: Tensor | None = None, context: Context) -> object:
    dtype = torch.float32 if value is None else value.dtype
    sizes = allowed(numbers(shape), dtype.itemsize, context)
    fill = 0.0 if value is None else number(value)
    return torch.full(sizes, fill, dtype=dtype, device=context.device)


@operator("Range", 11, sizes=(0, 1, 2))
def range_(start: Tensor, limit: Tensor, delta: Tensor, *, context: Context) -> Tensor:
    first, last, step = number(start), number(limit), number(delta)
    if step == 0:
        raise OnnxError(f"{context.node}: the step of a range is 0")
    if all(isinstance(n, (int, float)) for n in (first, last, step)):
        count = max(math.ceil((last - first) / step), 0)
        allowed([count], start.dtype.itemsize, context)
        if isinstance(first, float):
            return (torch.arange(count, device=context.device) * step + first).to(start.dtype)
    return torch.arange(first, last, step, dtype=start.dtype, device=context.device)


@operator("EyeLike", 9)
def eye_like(x: Tensor, *, dtype: int | None = None, k: int = 0) -> Tensor:
    code = dtype or code_of(x)
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape)
    return cast_to((rows.unsqueeze(1) + k == columns).to(torch.int64), code)


def _random(
    kind: str, shape: list, dtype: torch.dtype, a: float, b: float, seed: float | None, context: Context
) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    allowed(shape, wide.itemsize, context)
    generator = None
    if seed is not None:
        generator = torch.Generator(context.device).manual_seed(int(np.float32(seed).view(np.uint32)))
    make = torch.rand if kind == "uniform" else torch.randn
    x = make(shape, dtype=wide, device=context.device, generator=generator)
    return (x * (b - a) + a if kind == "uniform" else x * b + a).to(dtype)


@operator("RandomUniform", random=True)
def random_uniform(
    *,
    shape: list[int],
    dtype: int = 1,
    low: float = 0.0,
    high: float = 1.0,
    seed: float | None = None,
    context: Context,
) -> Tensor:
    return _random("uniform", shape, DTYPES[dtype], low, high, seed, context)


@operator("RandomNormal", random=True)
def random_normal(
    *,
    shape: list[int],
    dtype: int = 1,
    mean: float = 0.0,
    scale: float = 1.0,
    seed: float | None = None,
    context: Context,
) -> Tensor:
    return _random("normal", shape, DTYPES[dtype], mean, scale, seed, context)


def _float_like(x: Tensor, code: int | None) -> torch.dtype:
    return DTYPES[code] if code else x.dtype if x.is_floating_point() else torch.float32


@operator("RandomUniformLike", random=True)
def random_uniform_like(
    x: Tensor,
    *,
    dtype: int | None = None,
    low: float = 0.0,
    high: float = 1.0,
    seed: float | None = None,
    context: Context,
) -> Tensor:
    return _random("uniform", list(x.shape), _float_like(x, dtype), low, high, seed, context)


@operator("RandomNormalLike", random=True)
def random_normal_like(
    x: Tensor,
    *,
    dtype: int | None = None,
    mean: float = 0.0,
    scale: float = 1.0,
    seed: float | None = None,
    context: Context,
) -> Tensor:
    return _random("normal", list(x.shape), _float_like(x, dtype), mean, scale, seed, context)


@operator("Bernoulli", 15, random=True)
def bernoulli(x: Tensor, *, dtype: int | None = None, seed: float | None = None, context: Context) -> object:
    drawn = _random("uniform", list(x.shape), torch.float32, 0.0, 1.0, seed, context) < x
    return cast_to(drawn, dtype or code_of(x))


@operator("Multinomial", 7, random=True)
def multinomial(
    x: Tensor, *, dtype: int = elements.INT32, sample_size: int = 1, seed: float | None = None, context: Context
) -> Tensor:
    """Places drawn by unnormalised log-probabilities."""
    uniform = _random("uniform", [x.shape[0], sample_size, x.shape[1]], torch.float32, 0.0, 1.0, seed, context)
    gumbel = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
    return (x.float().unsqueeze(1) + gumbel).argmax(-1).to(DTYPES[dtype])


def _window(size: Tensor, parts: tuple[float, ...], periodic: int, output_datatype: int, context: Context) -> object:
    count = int(number(size))
    allowed([count], 8, context)
    angle = (
        torch.arange(count, dtype=torch.float64, device=context.device)
        * 2
        * math.pi
        / (count if periodic else count - 1)
    )
    total = sum(((-1) ** i * p * torch.cos(i * angle) for i, p in enumerate(parts)), torch.zeros_like(angle))
    return cast_to(total, output_datatype)


@operator("HannWindow", 17, sizes=(0,))
def hann_window(size: Tensor, *, periodic: int = 1, output_datatype: int = 1, context: Context) -> object:
    return _window(size, (0.5, 0.5), periodic, output_datatype, context)


@operator("HammingWindow", 17, sizes=(0,))
def hamming_window(size: Tensor, *, periodic: int = 1, output_datatype: int = 1, context: Context) -> object:
    return _window(size, (25 / 46, 21 / 46), periodic, output_datatype, context)


@operator("BlackmanWindow", 17, sizes=(0,))
def blackman_window(size: Tensor, *, periodic: int = 1, output_datatype: int = 1, context: Context) -> object:
    return _window(size, (0.42, 0.5, 0.08), periodic, output_datatype, context)


@operator("MelWeightMatrix", 17, sizes=(0, 1, 2, 3, 4))
def mel_weight_matrix(
    bins: Tensor,
    dft_length: Tensor,
    rate: Tensor,
    low: Tensor,
    high: Tensor,
    *,
    output_datatype: int = 1,
    context: Context,
) -> object:
    """Triangles on the mel scale, as columns over the bins of a spectrum."""
    count, length, hertz = int(number(bins)), int(number(dft_length)), number(rate)
    rows = length // 2 + 1
    allowed([rows, count], 8, context)

    def mel(f: float) -> float:
        return 2595.0 * math.log10(1.0 + f / 700.0)

    lowest, highest = mel(number(low)), mel(number(high))
    step = (highest - lowest) / (count + 2)
    edges = [700.0 * (10 ** ((lowest + step * i) / 2595.0) - 1.0) for i in range(count + 2)]
    places = torch.tensor([math.floor((length + 1) * f / hertz) for f in edges], dtype=torch.float64)
    row = torch.arange(rows, dtype=torch.float64).unsqueeze(1)
    left, middle, right = places[:-2], places[1:-1], places[2:]
    rising = (row - left) / (middle - left).clamp(min=1) * ((row >= left) & (row <= middle))
    rising = torch.where(middle == left, (row == middle).double(), rising)
    falls = (right > middle) & (row >= middle) & (row < right)
    weights = torch.where(falls, (right - row) / (right - middle).clamp(min=1), rising)
    return cast_to(weights.to(context.device), output_datatype)
