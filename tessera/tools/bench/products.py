"""Schedules of matrix products side by side: `python -m tessera.tools.bench.products`, on a GPU.

For every function and size: cuBLAS's product alone, eager, then our kernel under each schedule, checked against eager
before it is timed. A row says how long a call takes, at what rate, and how that compares with the product alone. What
does not compile, does not fit or is wrong says so. The first proposal of the target is marked; the fastest row of a
size is what `propose` should put first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.executors import tile
from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.record import record
from tessera.tile.from_trace.kernel import TileKernel
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets import named
from tessera.tools.bench.kernel_cases import linear_gelu, linear_residual, linear_silu, linear_swiglu
from tessera.tools.bench.kernel_cuda import Clock

Shape = tuple[int, ...]
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], int, Callable[[int], list[Shape]]]] = {
    # name: the function, how many products it has, the shapes of its arguments
    "gelu": (linear_gelu, 1, lambda n: [(n, n), (n, n), (n,)]),
    "silu": (linear_silu, 1, lambda n: [(n, n), (n, n), (n,)]),
    "residual": (linear_residual, 1, lambda n: [(n, n), (n, n), (n, n)]),
    "swiglu": (linear_swiglu, 2, lambda n: [(n, n), (n, n), (n, n)]),
    "relu": (lambda x, w: F.linear(x, w).relu(), 1, lambda n: [(n, n), (n, n)]),
}
BULK = ("bulk", True)


def candidates(products: int) -> list[Schedule]:
    """Tiles, warps, stages and how the epilogue is written."""

    def schedule(m: int, n: int, k: int, warps: int, stages: int, group: int = 8, **switches: object) -> Schedule:
        blocks = (("i0", m), ("i1", n), ("r", k))
        extra = (BULK, *((key, value) for key, value in switches.items()))
        return Schedule(blocks, warps, stages, loop=True, persistent=True, group=group, extra=extra)

    if products > 1:
        return [
            schedule(128, 128, 64, 8, 4, flatten=True), schedule(128, 128, 64, 8, 3, flatten=True),
            schedule(128, 128, 64, 8, 3), schedule(128, 128, 64, 8, 3, parts=2, flatten=True),
            schedule(64, 128, 64, 4, 4, flatten=True), schedule(128, 64, 64, 4, 4, flatten=True),
        ]  # fmt: skip
    return [
        schedule(128, 256, 64, 8, 3, parts=2, flatten=True), schedule(128, 256, 64, 8, 3, parts=2),
        schedule(128, 256, 64, 8, 4, parts=4, flatten=True), schedule(128, 256, 64, 8, 3, parts=4, flatten=True),
        schedule(128, 256, 64, 8, 3, flatten=True), schedule(128, 256, 64, 8, 3, group=16, parts=2, flatten=True),
        schedule(128, 256, 64, 8, 3, group=4, parts=2, flatten=True),
        schedule(256, 128, 64, 8, 3, parts=2, flatten=True), schedule(128, 128, 64, 8, 4, flatten=True),
        schedule(128, 128, 64, 4, 4, flatten=True), schedule(128, 128, 128, 8, 3, flatten=True),
        schedule(128, 256, 64, 8, 3, parts=2, warp_specialize=True),
        replace(schedule(128, 256, 64, 8, 3), persistent=False, extra=()),
    ]  # fmt: skip


def kernel(function: Callable, inputs: Sequence[Tensor], schedule: Schedule | None = None) -> TileKernel:
    """Our kernel of a function under a schedule, or under the target's first proposal."""
    mode = fake.default_mode()
    fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
    body, _ = record(function, fakes, [f"x{i}" for i in range(len(inputs))], _whole, Builder("product", mode))
    target = named("triton")
    if target is None:
        raise RuntimeError("Triton is not installed")
    return tile.build(tile.decompose(body), target, schedule)


def _whole(op: object) -> bool:
    return True


def rows(name: str, size: int, clock: Clock, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """The lines of one function at one size."""
    function, products, shapes = FUNCTIONS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=dtype, device=clock.device) * s[-1] ** -0.25 for s in shapes(size)]
    flops = 2.0 * products * size**3
    alone = clock(lambda: [inputs[0] @ w for w in inputs[1 : 1 + products]])
    want = function(*inputs).float()
    lines = [_line("cuBLAS, the product alone", alone, flops, alone)]
    lines.append(_line("eager", clock(lambda: function(*inputs)), flops, alone))
    proposed = kernel(function, inputs).schedule
    for schedule in dict.fromkeys((proposed, *candidates(products))):
        title = _title(schedule) + (" (proposed)" if schedule == proposed else "")
        try:
            launch = kernel(function, inputs, schedule)
            off = (launch(*inputs)[0].float() - want).abs().max().item() / want.abs().max().item()
            lines.append(
                f"  {title:<78} wrong by {off:.2g}" if off > 2e-2 else _time(title, launch, inputs, flops, alone, clock)
            )
        except Exception as error:  # a schedule that does not compile or fit; the next one may
            lines.append(
                f"  {title:<78} {type(error).__name__}: {str(error).splitlines()[0][:60] if str(error) else ''}"
            )
    return [f"{name} {size}³ {str(dtype).removeprefix('torch.')}", *lines]


def _time(title: str, launch: Callable, inputs: Sequence[Tensor], flops: float, alone: float, clock: Clock) -> str:
    return _line(title, clock(lambda: launch(*inputs)), flops, alone)


def _line(title: str, seconds: float, flops: float, alone: float) -> str:
    return f"  {title:<78} {seconds * 1e6:8.1f} µs {flops / seconds / 1e12:6.0f} TFLOP/s {seconds / alone:6.3f}"


def _title(s: Schedule) -> str:
    extra = " ".join(f"{k}={v}" for k, v in s.extra if v is not True) + "".join(
        f" {k}" for k, v in s.extra if v is True
    )
    return f"{'x'.join(str(n) for _, n in s.blocks)} {s.warps} warps {s.stages} stages group {s.group} {extra}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FUNCTIONS, default=["gelu", "residual", "swiglu"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[4096, 8192])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    clock = Clock("cuda", args.rounds)
    for name in args.only:
        for size in args.sizes:
            print("\n".join(rows(name, size, clock)), flush=True)


if __name__ == "__main__":
    main()
