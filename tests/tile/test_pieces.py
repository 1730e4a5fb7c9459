"""Reductions on the CPU over dimensions that lie apart: pieces of an axis, against the reference interpreter."""

from __future__ import annotations

import pytest
import torch

from tessera.tile.dialect import interp
from tessera.tile.dialect.build import KernelBuilder, bf16, f32, f64, i32
from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.cpu.host import host
from tessera.tile.targets.cpu.layout import layout, piece_of
from tessera.tile.targets.cpu.target import CpuTarget, module_text

TARGET = CpuTarget()

SHAPES = [(6, 3, 196), (5, 4, 49), (3, 2, 17), (40, 2, 100), (300, 2, 33), (4, 3, 48), (7, 2, 5)]  # images, channels, …
IDS = ["x".join(map(str, s)) for s in SHAPES]


def at(i, r, channels: int, pixels: int):
    return i * pixels + r % pixels + r // pixels * (channels * pixels)


def check(kernel: KernelOp, tensors: list[torch.Tensor], schedule: Schedule | None = None, rtol: float = 1e-5) -> None:
    mine, theirs = [t.clone() for t in tensors], [t.clone() for t in tensors]
    TARGET.compile(kernel, schedule or Schedule())(mine, [])
    interp.run(kernel, theirs, [])
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol if a.dtype is not torch.bfloat16 else 1e-2, atol=rtol)


def numbers(element, count: int) -> torch.Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dtype = torch_dtype(element)
    return x.to(dtype) if dtype.is_floating_point else (x * 20).to(dtype)


def reduction(kind: str, element, shape: tuple[int, int, int]) -> KernelOp:
    images, channels, pixels = shape
    k = KernelBuilder("reduce")
    i, r = k.axis("i", channels), k.axis("r", images * pixels, reduce=True)
    x = k.load(k.buffer(element), at(i, r, channels, pixels))
    total = k.reduce(kind, k.cast(x, f32) if element == bf16 else x, "r")
    k.store(total, k.buffer(total.type.element), i)
    return k.finish()


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_reductions(shape):
    for kind, element in [("sum", f32), ("sum", bf16), ("sum", f64), ("max", f32), ("min", i32), ("argmax", f32)]:
        kernel = reduction(kind, element, shape)
        out = torch.zeros(shape[1], dtype=torch_dtype(kernel.buffers[1].type.element))
        check(kernel, [numbers(element, shape[0] * shape[1] * shape[2]), out])


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("lanes", [0, 16, 64])
def test_what_is_computed_between_reductions(shape, lanes):
    """A softmax over a channel: values are kept from loop to loop, and nothing is written past the end."""
    images, channels, pixels = shape
    k = KernelBuilder("softmax")
    i, r = k.axis("i", channels), k.axis("r", images * pixels, reduce=True)
    x, y = k.buffer(f32), k.buffer(f32)
    a = k.load(x, at(i, r, channels, pixels))
    e = k.apply("exp", k.apply("sub", a, k.reduce("max", a, "r")))
    k.store(k.apply("div", e, k.reduce("sum", e, "r")), y, at(i, r, channels, pixels))
    count = images * channels * pixels
    schedule = Schedule(extra=(("vector", "r"), ("lanes", lanes)))
    check(k.finish(), [numbers(f32, count), torch.full((count + 1,), 9.0)], schedule)


def test_all_accesses_are_runs():
    seen = layout(reduction("sum", f32, (6, 3, 196)))
    assert piece_of(seen, 32, 16) == 196 and piece_of(seen, 4, 4) == 0  # 4 divides 196: chunks of 4 fit
    assert piece_of(layout(reduction("sum", f32, (6, 3, 64))), 32, 16) == 0
    assert piece_of(layout(reduction("sum", f32, (6, 3, 5))), 32, 16) == 0  # lanes would stay empty
    assert "gather" not in module_text(reduction("sum", f32, (6, 3, 196)), Schedule(), host())


def test_long_sums_stay_exact_enough():
    """Equal numbers: one accumulator would lose two digits."""
    for shape in ((20000, 1, 49), (150, 1, 7001)):
        count = shape[0] * shape[2]
        x, out = torch.full((count,), 0.1), torch.zeros(1)
        TARGET.compile(reduction("sum", f32, shape), Schedule(extra=(("vector", "r"),)))([x, out])
        want = x.double().sum().item()
        assert abs(out.item() - want) <= 4e-6 * want
