"""Artifacts of programs that compute with floats which sizes decide: scales, roots, rounded products."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tessera

SIZED: dict[str, Callable[[Tensor], object]] = {
    "halves": lambda x: (x * (x.shape[0] / 2), x.shape[0] / 2, torch.arange(0, x.shape[1] / 2, 0.5)),
    "roots": lambda x: (x / math.sqrt(x.shape[0]), x * x.shape[1] ** -0.5, x * (0.25 * x.shape[0] + 1)),
    "half as much again": lambda x: F.interpolate(x[None], scale_factor=1.5, mode="linear"),
    "smaller": lambda x: F.interpolate(x[None], scale_factor=0.7),
    "of two dimensions": lambda x: F.interpolate(x[None, None], scale_factor=(2.5, 0.5), mode="bicubic"),
    "the larger": lambda x: F.gelu(x) * max(x.shape[0], 5.5),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZED)
def test_floats_that_sizes_decide(tmp_path: Path, name: str) -> None:
    fn = SIZED[name]

    def call(x: Tensor) -> object:
        return fn(x)

    path = tmp_path / "m.tess"
    tessera.export(call, (torch.randn(4, 6),), path, dynamic={"x": {0: ("rows", 2, 99), 1: ("columns", 4, 99)}})
    ways = [tessera.load(path), tessera.load(path, trust=False, compile=False), tessera.load(path, trust=False)]
    for shape in ((4, 6), (7, 9), (3, 5)):
        x = torch.randn(shape)
        for run in ways:
            torch.testing.assert_close(run(x), call(x))
