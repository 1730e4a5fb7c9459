"""Average pools made at random from a seed, on one target: `python average_cases.py MODE START COUNT` tells which fail.

The modes are those of `run_regions`; `triton` needs TRITON_INTERPRET=1. A case has windows of any size, stride and
padding over one to three dimensions, with sizes rounded up or down, padding counted or not, or another divisor, in both
memory formats. Values and gradients must be PyTorch's in float64 up to a rounding.
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
from pool_cases import built

from tessera.ops.pool import FORMATS

OPS = {n: getattr(torch.ops.aten, f"avg_pool{n}d").default for n in (1, 2, 3)}


@dataclass(frozen=True)
class Case:
    windows: tuple[list[int], list[int], list[int]]  # kernel, stride, padding
    options: tuple  # ceil_mode, count_include_pad, and in two or three dimensions a divisor
    x: Tensor
    channels_last: bool
    around: bool  # with arithmetic before and after, in the same kernel

    @property
    def n(self) -> int:
        return len(self.windows[0])

    def forward(self, x: Tensor) -> Tensor:
        y = OPS[self.n](-x if self.around else x, *self.windows, *self.options)
        return y * 2 if self.around else y

    def backward(self, g: Tensor) -> Tensor:
        size = list(self.x.shape)
        dx = torch.ops.tessera.avg_pool_backward(
            g * 2 if self.around else g, size, *self.windows, *self.options, self.channels_last
        )
        return -dx if self.around else dx


def make(seed: int) -> Case:
    rng = random.Random(seed)
    n = rng.choice([1, 2, 2, 2, 2, 3])
    kernel = [rng.choice([1, 2] if n == 3 else [1, 2, 3, 3, 4]) for _ in range(n)]
    stride, padding = [rng.choice([1, 2, 2, 3]) for _ in range(n)], [rng.randint(0, k // 2) for k in kernel]
    shape = [rng.choice([1, 2]), rng.choice([3, 8]), *(k + rng.randrange(8) for k in kernel)][rng.random() < 0.2 :]
    options = (rng.random() < 0.5, rng.random() < 0.5, *([rng.choice([None, None, 3, -2])] if n > 1 else []))
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    dtype = torch.float32 if n == 3 and dtype is torch.bfloat16 else dtype  # PyTorch has none on a CPU
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    last = x.ndim in FORMATS and n == x.ndim - 2 and rng.random() < 0.5
    x = x.contiguous(memory_format=FORMATS[x.ndim]) if last else x
    return Case((kernel, stride, padding), options, x, last, rng.random() < 0.3)


def check(seed: int, mode: str) -> None:
    """Values and gradient of a case, by kernels of a target."""
    case = make(seed)
    like, wide = case.forward(case.x), case.x.double().requires_grad_()
    wanted = case.forward(wide)
    (got,) = built(case.forward, mode, case.x)
    near = {"rtol": torch.finfo(case.x.dtype).eps * 4, "atol": 1e-6}
    torch.testing.assert_close(got, wanted.to(got.dtype), **near)
    assert got.stride() == like.stride()
    if case.n == 1:  # whose gradient PyTorch writes over planes of one row
        return
    g = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)
    g = g.contiguous(memory_format=FORMATS[g.ndim]) if case.channels_last else g
    (dx,) = built(case.backward, mode, g)
    (exact,) = torch.autograd.grad(wanted, wide, g.double())
    torch.testing.assert_close(dx, exact.to(dx.dtype), **near)
    assert dx.stride() == case.x.stride()


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
