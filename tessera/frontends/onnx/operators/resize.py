"""Resize: images at another size, one dimension after the other.

Each dimension is a matrix of weights, found from the sizes alone. Where PyTorch has the very same interpolation as one
operator, that runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.allocation import allowed
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.values import Untraceable, literal, numbers

Tensor = torch.Tensor


@dataclass(frozen=True)
class _How:
    mode: str
    coordinates: str
    nearest: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    extrapolation: float = 0.0


def _origin(how: _How, out: int, size: int, scale: float, roi: tuple[float, float]) -> np.ndarray:
    """Where in the old image each new element comes from. Nearest ones are found in single precision, as runtimes and
    PyTorch do: halfway between two elements the rounding decides which one it is."""
    o = np.arange(out, dtype=np.float32 if how.mode == "nearest" else np.float64)
    match how.coordinates:
        case "half_pixel":
            return (o + 0.5) / scale - 0.5
        case "half_pixel_symmetric":
            adjustment = out / (scale * size)
            return size / 2 * (1 - adjustment) + (o + 0.5) / scale - 0.5
        case "pytorch_half_pixel":
            return (o + 0.5) / scale - 0.5 if out > 1 else np.zeros(out)
        case "align_corners":
            return o * (size - 1) / (scale * size - 1) if out > 1 else np.zeros(out)
        case "asymmetric":
            return o / scale
        case "tf_half_pixel_for_nn":
            return (o + 0.5) / scale
        case "tf_crop_and_resize":
            start, end = roi
            if out > 1:
                return start * (size - 1) + o * (end - start) * (size - 1) / (scale * size - 1)
            return np.full(out, 0.5 * (start + end) * (size - 1))
    raise OnnxError(f"coordinate_transformation_mode: unknown {how.coordinates!r}")


_ROUND: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _linear(t: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(t), 0)


def _cubic(a: float) -> Callable[[np.ndarray], np.ndarray]:
    def kernel(t: np.ndarray) -> np.ndarray:
        t = np.abs(t)
        near = (a + 2) * t**3 - (a + 3) * t**2 + 1
        far = a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
        return np.where(t <= 1, near, np.where(t < 2, far, 0.0))

    return kernel


def _weights(how: _How, out: int, size: int, scale: float, roi: tuple[float, float]) -> np.ndarray:
    """[out, size]: how much of each old element every new one has."""
    origin = _origin(how, out, size, scale, roi)
    matrix = np.zeros((out, size))
    if how.mode == "nearest":
        if how.nearest not in _ROUND:
            raise OnnxError(f"nearest_mode: expected {', '.join(_ROUND)}, got {how.nearest!r}")
        places = np.clip(_ROUND[how.nearest](origin), 0, size - 1).astype(np.int64)
        matrix[np.arange(out), places] = 1
        return matrix
    kernel, reach = (_linear, 1) if how.mode == "linear" else (_cubic(how.cubic), 2)
    shrink = min(scale, 1.0) if how.antialias else 1.0
    reach = math.ceil(reach / shrink)
    for o, x in enumerate(origin):
        places = np.arange(math.floor(x) - reach + 1, math.floor(x) + reach + 1)
        weights = kernel((x - places) * shrink)
        if how.exclude_outside:
            weights = np.where((places >= 0) & (places < size), weights, 0.0)
        if how.exclude_outside or how.antialias:
            weights = weights / weights.sum()
        np.add.at(matrix[o], np.clip(places, 0, size - 1), weights)
    return matrix


def _resized(x: Tensor, axis: int, out: int, scale: float, roi: tuple[float, float], how: _How) -> Tensor:
    size = x.shape[axis]
    matrix = _weights(how, out, size, scale, roi)
    if how.mode == "nearest":
        y = x.index_select(axis, literal(matrix.argmax(1).tolist(), torch.int64).to(x.device))
    else:
        wide = x if x.is_floating_point() else x.float()
        weights = literal(matrix.tolist(), torch.float64).to(x.device).to(wide.dtype)
        y = (wide.movedim(axis, -1) @ weights.t()).movedim(-1, axis)
    if how.coordinates == "tf_crop_and_resize":
        origin = _origin(how, out, size, scale, roi)
        shape = [1] * x.ndim
        shape[axis] = -1
        outside = literal(((origin < 0) | (origin > size - 1)).tolist(), torch.bool).to(x.device).reshape(shape)
        y = torch.where(outside, how.extrapolation, y)
    return y


def _in_one(x: Tensor, sizes: list[int], scales: list[float], axes: list[int], how: _How) -> Tensor | None:
    """PyTorch's own operator, where it means the same."""
    rank = x.ndim - 2
    if not x.is_floating_point() or rank not in (1, 2, 3) or how.antialias or how.exclude_outside:
        return None
    changed = [a for a, s in zip(axes, sizes, strict=True) if s != x.shape[a]]
    if any(a < 2 for a in changed) or any(
        not math.isclose(s, n / x.shape[a]) for s, n, a in zip(scales, sizes, axes, strict=True)
    ):
        return None
    target = list(x.shape[2:])
    for a, n in zip(axes, sizes, strict=True):
        if a >= 2:
            target[a - 2] = n
    kind = {1: "linear", 2: "bilinear", 3: "trilinear"}[rank]
    whole = all(n % x.shape[a] == 0 for n, a in zip(sizes, axes, strict=True))
    if how.mode == "nearest" and how.coordinates == "asymmetric" and how.nearest == "floor" and whole:
        return F.interpolate(x, target, mode="nearest")
    if how.mode == "linear" and (
        how.coordinates == "align_corners"
        or how.coordinates in ("half_pixel", "pytorch_half_pixel")
        and all(n > 1 for n in target)
    ):
        return F.interpolate(x, target, mode=kind, align_corners=how.coordinates == "align_corners")
    if how.mode == "cubic" and rank == 2 and how.cubic == -0.75 and how.coordinates in ("align_corners", "half_pixel"):
        return F.interpolate(x, target, mode="bicubic", align_corners=how.coordinates == "align_corners")
    return None


def _resize(
    x: Tensor,
    roi: list | None,
    scales: list | None,
    sizes: list | None,
    axes: list[int] | None,
    policy: str,
    how: _How,
    context: Context,
) -> Tensor:
    if any(not isinstance(n, int) for n in x.shape):
        raise Untraceable("Resize is written for sizes that are numbers")
    dims = [a % x.ndim for a in axes] if axes else list(range(x.ndim))
    if sizes:
        old = [x.shape[d] for d in dims]
        new = [int(n) for n in sizes]
        ratios = [n / o for n, o in zip(new, old, strict=True)]
        if policy != "stretch":
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            ratios, new = [ratio] * len(dims), [math.floor(ratio * o + 0.5) for o in old]
    elif scales:
        ratios = [float(s) for s in scales]
        new = [math.floor(x.shape[d] * s) for d, s in zip(dims, ratios, strict=True)]
    else:
        raise OnnxError("Resize: expected scales or sizes, got neither")
    whole = list(x.shape)
    for d, n in zip(dims, new, strict=True):
        whole[d] = n
        allowed([n, x.shape[d]], 8, context)  # the matrix of weights
    allowed(whole, x.element_size(), context)
    crops = how.coordinates == "tf_crop_and_resize"
    if not crops and (y := _in_one(x, new, ratios, dims, how)) is not None:
        return y
    dtype = x.dtype
    for i, (d, n, s) in enumerate(zip(dims, new, ratios, strict=True)):
        area = (float(roi[i]), float(roi[len(dims) + i])) if crops and roi else (0.0, 1.0)
        if n != x.shape[d] or s != 1 or crops:
            x = _resized(x, d, n, s, area, how)
    return x if x.dtype == dtype else torch.round(x).to(dtype)


@operator("Resize", 11, sizes=(1, 2, 3))
def resize(
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
    *,
    antialias: int = 0,
    axes: list[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
    context: Context,
) -> Tensor:
    how = _How(
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        cubic_coeff_a,
        bool(exclude_outside),
        bool(antialias),
        extrapolation_value,
    )
    listed = [None if t is None else numbers(t) for t in (roi, scales, sizes)]
    return _resize(x, *listed, axes, keep_aspect_ratio_policy, how, context)


@operator("Resize", 10, 10, sizes=(1,))
def resize_of_opset_10(x: Tensor, scales: Tensor, *, mode: str = "nearest", context: Context) -> Tensor:
    return _resize(x, None, numbers(scales), None, None, "stretch", _How(mode, "asymmetric", "floor"), context)


@operator("Upsample", 9, 9, sizes=(1,))
def upsample(x: Tensor, scales: Tensor, *, mode: str = "nearest", context: Context) -> Tensor:
    return _resize(x, None, numbers(scales), None, None, "stretch", _How(mode, "asymmetric", "floor"), context)


@operator("Upsample", 7, 8)
def upsample_by_attribute(x: Tensor, *, scales: list[float], mode: str = "nearest", context: Context) -> Tensor:
    return _resize(x, None, scales, None, None, "stretch", _How(mode, "asymmetric", "floor"), context)


@operator("Upsample", 1, 6)
def upsample_of_images(
    x: Tensor, *, height_scale: float, width_scale: float, mode: str = "nearest", context: Context
) -> Tensor:
    how = _How("linear" if mode == "bilinear" else mode, "asymmetric", "floor")
    return _resize(x, None, [1, 1, height_scale, width_scale], None, None, "stretch", how, context)
