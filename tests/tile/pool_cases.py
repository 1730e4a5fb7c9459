"""Max pools made at random from a seed, on one target: `python pool_cases.py MODE START COUNT` tells the wrong ones.

The modes are those of `run_regions`; `triton` needs TRITON_INTERPRET=1. A case has windows of any size, stride, padding
and dilation over one to three dimensions, in both memory formats, over numbers with many equal ones, with NaN and -inf.
Values and offsets must be those of the operators as PyTorch computes them bit for bit, gradients those of float64 up to
a rounding; `tests/ops/test_pool.py` holds the operators against PyTorch's own.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from programs import trace_of
from run_regions import target_of

from tessera.executors import tile
from tessera.ops.pool import FORMATS

ops = torch.ops.tessera


@dataclass(frozen=True)
class Case:
    windows: tuple[list[int], list[int], list[int], list[int]]  # kernel, stride, padding, dilation
    ceil_mode: bool
    x: Tensor
    channels_last: bool
    around: bool  # with arithmetic before and after, in the same kernel

    @property
    def format(self) -> torch.memory_format:
        return FORMATS[self.x.ndim] if self.channels_last else torch.contiguous_format


def make(seed: int) -> Case:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    n = rng.choice([1, 2, 2, 2, 2, 3])
    kernel, stride = [rng.choice([1, 2, 3, 3, 4]) for _ in range(n)], [rng.choice([1, 2, 2, 3]) for _ in range(n)]
    dilation = [rng.choice([1, 1, 1, 2, 3]) for _ in range(n)]
    padding = [rng.randint(0, k // 2) for k in kernel]
    size = [(k - 1) * d + 1 + rng.randrange(8) for k, d in zip(kernel, dilation, strict=True)]
    shape = [rng.choice([1, 2]), rng.choice([3, 8]), *size][rng.random() < 0.2 :]
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64])
    x = torch.randint(-3, 4, shape, generator=generator).to(dtype)
    draws = torch.rand(shape, generator=generator)
    x = torch.where(draws < rng.choice([0, 0.1]), torch.nan, x)
    if n < 3:  # over planes of planes PyTorch's index of a window of nothing but -inf lies outside of it
        x = torch.where(draws > rng.choice([0.2, 2]), -torch.inf, x)
    last = x.ndim in FORMATS and n == x.ndim - 2 and rng.random() < 0.5
    ceil_mode, around = rng.random() < 0.4, rng.random() < 0.3
    x = x.contiguous(memory_format=FORMATS[x.ndim]) if last else x
    return Case((kernel, stride, padding, dilation), ceil_mode, x, last, around)


def check(seed: int, mode: str) -> None:
    """Values, offsets and gradient of a case, by kernels of a target."""
    case = make(seed)
    size = list(case.x.shape)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        values, offsets = ops.max_pool(-x if case.around else x, *case.windows, case.ceil_mode)
        return values * 2 if case.around else values, offsets

    def backward(g: Tensor, offsets: Tensor) -> Tensor:
        dx = ops.max_pool_backward(g * 2 if case.around else g, offsets, size, *case.windows, case.channels_last)
        return -dx if case.around else dx

    values, offsets = forward(case.x)
    got = built(forward, mode, case.x)
    for a, b in zip(got, (values, offsets), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert a.stride() == b.stride()
    g = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed)).to(values.dtype)
    g = g.contiguous(memory_format=case.format)
    (dx,) = built(backward, mode, g, offsets)
    wanted = backward(g.double(), offsets)
    torch.testing.assert_close(dx, wanted.to(dx.dtype), rtol=torch.finfo(dx.dtype).eps * 4, atol=1e-6)
    assert dx.stride() == wanted.stride()


def built(fn, mode: str, *args: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN001
    """A function as one kernel of a target, run."""
    return tuple(tile.build(trace_of(fn, *args), target_of(mode))(*args))


def run(mode: str, seeds: range) -> list[str]:
    """What went wrong, seed by seed."""
    failures = []
    for seed in seeds:
        try:
            check(seed, mode)
        except Exception as error:  # whatever it is, it is this case's failure, and the others go on
            failures.append(f"seed {seed} ({mode}): {make(seed)}\n{type(error).__name__}: {error}")
    return failures


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[3])))))
