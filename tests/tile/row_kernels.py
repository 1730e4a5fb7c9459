"""The kernels that the compiler makes of softmaxes, norms and losses over rows, forward and backward, for a GPU that
need not be there. `kernels_of(name, rows, row, dtype)` gives each with the schedule that is proposed first, in halves
where it is shared out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from on_h200 import propose

from tessera.executors import tile
from tessera.executors.regions import body_of
from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.record import record
from tessera.ops.op import keep_whole
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.from_trace.region import lower
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.triton.halves import halves, in_two, schedules

aten = torch.ops.aten
X, W, ROW, TARGET = "matrix", "row", "column", "target"  # what an argument is

PROGRAMS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "softmax": (lambda x: F.softmax(x, -1), (X,)),
    "softmax_backward": (lambda g, y: aten._softmax_backward_data(g, y, -1, y.dtype), (X, X)),
    "layer_norm": (lambda x, w, b: aten.native_layer_norm(x, (x.shape[-1],), w, b, 1e-5), (X, W, W)),
    "layer_norm_backward": (
        lambda g, x, m, s, w, b: aten.native_layer_norm_backward(g, x, (x.shape[-1],), m, s, w, b, (True,) * 3),
        (X, X, ROW, ROW, W, W),
    ),
    "rms_norm": (lambda x, w: aten._fused_rms_norm(x, (x.shape[-1],), w, 1e-6), (X, W)),
    "rms_norm_backward": (
        lambda g, x, s, w: aten._fused_rms_norm_backward(g, x, (x.shape[-1],), s, w, (True, True)),
        (X, X, ROW, W),
    ),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t, reduction="none"), (X, TARGET)),
    "cross_entropy_backward": (
        lambda g, x, t: aten._log_softmax_backward_data(
            aten.nll_loss_backward(g, x, t, None, 0, -100, torch.ones((), device=x.device)), x, 1, x.dtype
        ),
        (TARGET + "_grad", X, TARGET),
    ),
}


def kernels_of(name: str, rows: int, row: int, dtype: torch.dtype) -> Iterator[tuple[KernelOp, Schedule]]:
    program, kinds = PROGRAMS[name]
    made = {
        X: ((rows, row), dtype),
        W: ((row,), dtype),
        ROW: ((rows, 1), torch.float32),
        TARGET: ((rows,), torch.int64),
        TARGET + "_grad": ((rows,), dtype),
    }
    mode = fake.default_mode()
    with mode:
        given = [torch.empty(made[kind][0], dtype=made[kind][1], device="cuda") for kind in kinds]
    trace, _ = record(program, given, [f"x{i}" for i in range(len(given))], keep_whole, Builder("program", mode))
    trace = tile.decompose(trace)
    for number, region in enumerate(tile.regions(trace)):
        kernel = lower(body_of(trace, list(region), f"{name}_{number}"), f"{name}_{number}").kernel
        yield from pieces(kernel, propose(kernel, {})[0])


def pieces(kernel: KernelOp, schedule: Schedule) -> Iterator[tuple[KernelOp, Schedule]]:
    """The kernels that are launched."""
    if not in_two(kernel, schedule):
        yield kernel, schedule
        return
    parts = halves(kernel, schedule)
    for half, own in zip((parts.first, parts.second), schedules(kernel, schedule, parts), strict=True):
        yield from pieces(half, own)
