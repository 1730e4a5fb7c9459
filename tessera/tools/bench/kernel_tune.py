"""`tessera bench kernels --tune`: which schedules are fast for the kernels of a case.

In: the cases, sizes and dtypes of the bench. Out: for every kernel that the tile executor makes for them, forward and
backward, the fastest schedules that were found and where the first proposal stands. The search starts from what the
target proposes and changes one thing at a time in the best so far (warps, stages, split, a block) while that helps.
Results are not kept: they are for whoever writes the proposals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from rich.markup import escape
from rich.table import Table

from tessera.executors import tile
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.from_trace.kernel import TileKernel
from tessera.tile.schedules.cost import cost
from tessera.tile.schedules.schedule import Schedule, reduced_axis
from tessera.tile.targets import target_for
from tessera.tile.targets.autotune import to_text
from tessera.tile.targets.base import Target
from tessera.tools.bench.kernel_cases import Case, Size, cotangents, results_of, with_grads
from tessera.tools.bench.kernel_cuda import DTYPES, Clock, Options, Say, copy_rate
from tessera.tools.bench.kernel_report import OURS
from tessera.tools.bench.probe import CONTESTANTS, fresh
from tessera.util.units import duration

ROUNDS, SHOWN = 4, 4


@dataclass(frozen=True)
class Tuned:
    """One kernel: schedules with their seconds, best first."""

    case: str
    size: str
    dtype: str
    kernel: str
    bytes: int
    copy: float  # bytes a second
    first: float  # seconds of the first proposal
    found: tuple[tuple[float, Schedule], ...]

    def fraction(self, seconds: float) -> float:
        return self.bytes / self.copy / seconds


def run(options: Options, say: Say) -> list[Tuned]:
    clock = Clock(options.device, max(options.rounds // 3, 3))
    copy = copy_rate(clock)
    target = target_for(options.device)
    assert target is not None, f"no target for {options.device}"
    tuned = []
    for case, dtype, size in options.cases():
        for launch in kernels_for(case, DTYPES[dtype], size, options.device):
            kernel = launch.tile
            text, name = "x".join(map(str, size)), kernel.sym_name.data
            say(f"{case.name} {text} {dtype} {name}")
            times = tune(target, kernel, launch.examples(), clock)
            if times:
                ordered = sorted(times.items(), key=lambda item: item[1])
                best = tuple((seconds, schedule) for schedule, seconds in ordered[:SHOWN])
                first = times.get(target.propose(kernel, {})[0], float("nan"))
                tuned.append(Tuned(case.name, text, dtype, name, cost(kernel, {}).bytes, copy, first, best))
    return tuned


def kernels_for(case: Case, dtype: torch.dtype, size: Size, device: str) -> list[TileKernel]:
    """All kernels without symbols that a case needs, with its gradients where it has any."""
    inputs = with_grads(case, case.make(size, dtype, device))
    function = CONTESTANTS[OURS](fresh(case.function))
    with tile.own_kernels() as launchers, torch.set_grad_enabled(case.back is not None):
        results = results_of(function(*inputs))
        if case.back is not None:
            torch.autograd.grad(results, inputs[: case.grads], cotangents(tuple(y.detach() for y in results)))
        return [x for x in launchers.values() if x is not None and not x.tile.symbol_names]


def tune(target: Target, kernel: KernelOp, tensors: list[torch.Tensor], clock: Clock) -> dict[Schedule, float]:
    """Seconds of every schedule that was tried; those that do not compile or launch are left out."""
    times: dict[Schedule, float] = {}

    def trial(schedule: Schedule) -> None:
        if schedule in times:
            return
        try:
            compiled = target.compile(kernel, schedule)
            times[schedule] = clock(lambda: compiled(tensors, []))
        except Exception:  # out of registers or shared memory, or a block that the kernel does not allow
            times[schedule] = float("inf")

    for schedule in target.propose(kernel, {}):
        trial(schedule)
    for _ in range(ROUNDS):
        best = min(times, key=times.__getitem__, default=None)
        if best is None:
            break
        for near in neighbours(kernel, best):
            trial(near)
        if min(times, key=times.__getitem__) == best:
            break
    return {s: t for s, t in times.items() if t != float("inf")}


def neighbours(kernel: KernelOp, schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that differ in one thing."""
    for warps in (schedule.warps // 2, schedule.warps * 2):
        if 1 <= warps <= 32:
            yield replace(schedule, warps=warps)
    if schedule.loop or kernel.sequential_axis is not None:
        yield from (replace(schedule, stages=n) for n in (1, 2, 3, 4, 5) if n != schedule.stages)
    if schedule.split > 1:
        yield from (replace(schedule, split=n) for n in (schedule.split // 2, schedule.split * 2))
    whole = None if schedule.loop else reduced_axis(kernel)
    for k, (axis, block) in enumerate(schedule.blocks):
        for other in (block // 2, block * 2):
            if axis != whole and other >= 1:
                blocks = (*schedule.blocks[:k], (axis, other), *schedule.blocks[k + 1 :])
                yield replace(schedule, blocks=blocks)


def table(tuned: list[Tuned]) -> Table:
    shown = Table("what", "size", "dtype", "kernel", title="tessera bench kernels --tune", title_justify="left")
    for header in ("time", "of roofline", "first proposal"):
        shown.add_column(header, justify="right")
    shown.add_column("schedule", overflow="fold")
    for row in tuned:
        for place, (seconds, schedule) in enumerate(row.found):
            start = (row.case, row.size, row.dtype, row.kernel) if place == 0 else ("", "", "", "")
            first = f"{duration(row.first)}, {row.first / seconds:.2f}" if place == 0 else ""
            share = f"{row.fraction(seconds):.0%}"
            shown.add_row(*start, duration(seconds), share, first, escape(brief(schedule)))
        shown.add_section()
    return shown


def brief(schedule: Schedule) -> str:
    """A schedule in a few words; what is as usual is left out."""
    usual = Schedule()
    parts = [f"{axis}={n}" for axis, n in schedule.blocks] + [f"warps={schedule.warps}"]
    for field in ("stages", "loop", "split", "persistent", "group", "extra"):
        if (value := getattr(schedule, field)) != getattr(usual, field):
            parts.append(f"{field}={value}")
    return " ".join(parts)


def listed(tuned: list[Tuned]) -> list[dict[str, object]]:
    return [asdict(row) | {"found": [{"seconds": t, "schedule": to_text(s)} for t, s in row.found]} for row in tuned]
