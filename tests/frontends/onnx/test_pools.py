"""Pools with uneven padding and rounded counts: PyTorch's own where one of them gives the same windows, and right."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from graphs import model, node, value

import tessera

PADS = [(0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 1, 1), (1, 0, 0, 1), (2, 2, 1, 1)]


def windows(image: np.ndarray, size: int, stride: int, dilation: int, pads: tuple[int, ...], ceil: int) -> np.ndarray:
    """[n, c, rows, columns, elements of a window], by the words of the standard; NaN is padding."""
    top, left, bottom, right = pads
    starts = []
    for n, before, after in zip(image.shape[2:], (top, left), (bottom, right), strict=True):
        room = n + before + after - dilation * (size - 1) - 1
        count = (-(-room // stride) if ceil else room // stride) + 1
        starts.append([i * stride for i in range(count) if not ceil or i * stride < n + before])
    wide = np.pad(image, ((0, 0), (0, 0), (top, bottom + 99), (left, right + 99)), constant_values=np.nan)
    taps = np.arange(size) * dilation
    rows = [[wide[:, :, i + taps][..., j + taps].reshape(*image.shape[:2], -1) for j in starts[1]] for i in starts[0]]
    return np.stack([np.stack(row, 2) for row in rows], 2)


def pooled(op: str, image: np.ndarray, size: int, stride: int, dilation: int, pads: tuple[int, ...], ceil: int):
    pool = node(
        op, ["x"], ["y"], kernel_shape=[size] * 2, strides=[stride] * 2, dilations=[dilation] * 2, pads=pads,
        ceil_mode=ceil,
    )  # fmt: skip
    net = tessera.onnx.load(model([pool], [value("x", image.shape)], [value("y")]), compile=False)
    return net(torch.from_numpy(image)).numpy()


@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("pads", PADS)
def test_windows(pads: tuple[int, ...], ceil: int) -> None:
    rng = np.random.default_rng(0)
    for n, (size, stride, dilation) in product((7, 8), ((3, 2, 1), (3, 1, 1), (4, 3, 1), (3, 2, 2))):
        image = rng.standard_normal((2, 3, n, n + 1)).astype(np.float32)
        expected = windows(image, size, stride, dilation, pads, ceil)
        largest = pooled("MaxPool", image, size, stride, dilation, pads, ceil)
        np.testing.assert_array_equal(largest, np.nanmax(expected, -1))
        mean = pooled("AveragePool", image, size, stride, dilation, pads, ceil)
        np.testing.assert_allclose(mean, np.nanmean(expected, -1), rtol=1e-5, atol=1e-6)


def test_uneven_padding_is_one_operator() -> None:
    """As networks of Caffe2 have it."""
    pool = node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1])
    net = tessera.onnx.load(model([pool], [value("x", [1, 2, 8, 8])], [value("y")]))
    net(torch.randn(1, 2, 8, 8))
    captured = tessera.stages(net)["captured"].trace
    assert [eqn.opname for eqn in captured.equations] == ["max_pool2d"]
