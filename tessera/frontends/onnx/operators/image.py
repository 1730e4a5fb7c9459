"""Images: sampling on grids, regions of interest, boxes, decoding."""

from __future__ import annotations

import io
import math

import numpy as np
import torch
import torch.nn.functional as F

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.allocation import allowed
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.values import number, numbers

Tensor = torch.Tensor
_MODES = {"linear": "bilinear", "cubic": "bicubic", "bilinear": "bilinear", "bicubic": "bicubic", "nearest": "nearest"}


@operator("GridSample", 16)
def grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Tensor:
    return F.grid_sample(
        x, grid.to(x.dtype), mode=_MODES[mode], padding_mode=padding_mode, align_corners=bool(align_corners)
    )


@operator("AffineGrid", 20, sizes=(1,))
def affine_grid(theta: Tensor, size: Tensor, *, align_corners: int = 0, context: Context) -> Tensor:
    sizes = numbers(size)
    allowed([*sizes[:1], *sizes[2:], len(sizes) - 1], theta.element_size(), context)
    return F.affine_grid(theta, sizes, align_corners=bool(align_corners))


@operator("RoiAlign", 10)
def roi_align(
    x: Tensor,
    rois: Tensor,
    batch: Tensor,
    *,
    coordinate_transformation_mode: str | None = None,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    context: Context,
) -> Tensor:
    """Means, or largest, of samples in each bin of each region."""
    half = coordinate_transformation_mode or ("half_pixel" if context.version >= 16 else "output_half_pixel")
    offset = 0.5 if half == "half_pixel" else 0.0
    rows = []
    # How many samples a bin has may depend on the region, so that regions are taken one by one.
    samples = None if sampling_ratio > 0 else numbers(rois)
    for i in range(rois.shape[0]):
        left, top, right, bottom = (rois[i, j] * spatial_scale - offset for j in range(4))
        width, height = right - left, bottom - top
        if half != "half_pixel":
            width, height = torch.clamp(width, min=1.0), torch.clamp(height, min=1.0)
        if samples is None:
            ny = nx = sampling_ratio
        else:
            a, b, c, d = (samples[4 * i + j] * spatial_scale for j in range(4))
            grow = 1.0 if half != "half_pixel" else 0.0
            ny, nx = (max(math.ceil(max(s, grow) / n), 0) for s, n in ((d - b, output_height), (c - a, output_width)))
        allowed((x.shape[1], output_height * ny, output_width * nx), x.element_size(), context)
        ys = top + (torch.arange(output_height * ny, device=x.device) + 0.5) * height / (output_height * max(ny, 1))
        xs = left + (torch.arange(output_width * nx, device=x.device) + 0.5) * width / (output_width * max(nx, 1))
        corners = _corners(x.index_select(0, batch[i : i + 1].to(torch.int64)).squeeze(0), ys, xs)
        shape = (x.shape[1], output_height, ny, output_width, nx)
        if mode == "max":
            rows.append(torch.stack(corners).amax(0).reshape(shape).amax((2, 4)))
        else:
            rows.append(sum(corners[1:], corners[0]).reshape(shape).mean((2, 4)))
    return torch.stack(rows) if rows else x.new_zeros(0, x.shape[1], output_height, output_width)


def _corners(image: Tensor, ys: Tensor, xs: Tensor) -> list[Tensor]:
    """The four weighted neighbours of every sample, [channels, ys, xs] each."""
    h, w = image.shape[1:]
    inside = ((ys >= -1) & (ys <= h)).unsqueeze(1) & ((xs >= -1) & (xs <= w))
    ys, xs = ys.clamp(0, h - 1), xs.clamp(0, w - 1)
    y0, x0 = ys.floor().to(torch.int64), xs.floor().to(torch.int64)
    y1, x1 = (y0 + 1).clamp(max=h - 1), (x0 + 1).clamp(max=w - 1)
    fy, fx = (ys - y0).unsqueeze(1), xs - x0
    corners = []
    for yi, wy in ((y0, 1 - fy), (y1, fy)):
        for xi, wx in ((x0, 1 - fx), (x1, fx)):
            corners.append(image[:, yi][:, :, xi] * (wy * wx * inside))
    return corners


@operator("MaxRoiPool", 1)
def max_roi_pool(x: Tensor, rois: Tensor, *, pooled_shape: list[int], spatial_scale: float = 1.0) -> Tensor:
    boxes, (ph, pw), (h, w) = numbers(rois), pooled_shape, x.shape[2:]
    out = []
    for i in range(rois.shape[0]):
        image, *box = boxes[5 * i : 5 * i + 5]
        left, top, right, bottom = (math.floor(v * spatial_scale + 0.5) for v in box)
        bh, bw = max(bottom - top + 1, 1) / ph, max(right - left + 1, 1) / pw
        cells = []
        for r in range(ph):
            y0, y1 = (min(max(v + top, 0), h) for v in (math.floor(r * bh), math.ceil((r + 1) * bh)))
            for c in range(pw):
                x0, x1 = (min(max(v + left, 0), w) for v in (math.floor(c * bw), math.ceil((c + 1) * bw)))
                area = x[int(image), :, y0:y1, x0:x1]
                cells.append(area.amax((1, 2)) if y1 > y0 and x1 > x0 else x.new_zeros(x.shape[1]))
        out.append(torch.stack(cells, 1).reshape(-1, ph, pw))
    return torch.stack(out) if out else x.new_zeros(0, x.shape[1], ph, pw)


@operator("NonMaxSuppression", 10, interpreted="how many boxes are kept depends on the values of its inputs")
def non_max_suppression(
    boxes: Tensor,
    scores: Tensor,
    most: Tensor | None = None,
    overlap: Tensor | None = None,
    least: Tensor | None = None,
    *,
    center_point_box: int = 0,
) -> Tensor:
    count = 0 if most is None else int(number(most))
    threshold = 0.0 if overlap is None else float(number(overlap))
    lowest = None if least is None else float(number(least))
    kept: list[list[int]] = []
    for b in range(scores.shape[0]):
        corners = _corner_boxes(boxes[b].double().numpy(), center_point_box)
        for c in range(scores.shape[1]):
            kept += [[b, c, i] for i in _picked(corners, scores[b, c].numpy(), count, threshold, lowest)]
    return torch.tensor(kept, dtype=torch.int64).reshape(-1, 3)


def _corner_boxes(boxes: np.ndarray, centred: int) -> np.ndarray:
    if centred:
        x, y, w, h = boxes.T
        return np.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], 1)
    a, b, c, d = boxes.T
    return np.stack([np.minimum(a, c), np.minimum(b, d), np.maximum(a, c), np.maximum(b, d)], 1)


def _picked(boxes: np.ndarray, scores: np.ndarray, count: int, threshold: float, lowest: float | None) -> list[int]:
    """Boxes from the best score down, but those that overlap a better one too much."""
    chosen: list[int] = []
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    for i in np.argsort(-scores, kind="stable"):
        if len(chosen) >= count or (lowest is not None and scores[i] <= lowest):
            break
        others = boxes[chosen]
        sides = np.minimum(others[:, 2:], boxes[i, 2:]) - np.maximum(others[:, :2], boxes[i, :2])
        shared = np.maximum(sides, 0).prod(1)
        joined = areas[chosen] + areas[i] - shared
        if not np.any(shared > threshold * joined):
            chosen.append(int(i))
    return chosen


@operator("ImageDecoder", 20, interpreted="an image is decoded by a library")
def image_decoder(data: Tensor, *, pixel_format: str = "RGB", context: Context) -> Tensor:
    try:
        from PIL import Image
    except ImportError as error:
        raise OnnxError(f"{context.node}: decoding images needs the package pillow") from error
    formats = ("BMP", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
    with Image.open(io.BytesIO(bytes(data.tolist())), formats=formats) as image:
        if 4 * image.width * image.height > context.limits.tensor_bytes:
            raise OnnxError(f"{context.node}: an image of {image.width} × {image.height} is over the limit")
        if pixel_format == "Grayscale":
            return torch.from_numpy(np.array(image.convert("L"))[:, :, None])
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels[:, :, ::-1].copy() if pixel_format == "BGR" else pixels)
