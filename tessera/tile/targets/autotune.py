"""Chooses the schedule of a kernel: the first proposal, or with `config.autotune` the one that ran fastest here.

Measuring happens once for a kernel's structure, a class of sizes and a device; the winner is kept on disk under all
of these and the versions that made it. Without measuring the choice is the same everywhere and every time. Kernels
are measured on copies of their tensors, so that trying them changes nothing.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from tessera.tile.dialect.ops import KernelOp
from tessera.tile.schedules.schedule import Schedule, read_schedule
from tessera.tile.targets.base import CompiledKernel, Target
from tessera.util import disk as cache
from tessera.util.config import config

KIND = "schedule"
FORMAT = 1  # of the stored text
FLUSH_BYTES = 256 << 20  # more than any second-level cache
WARM_UP, TURNS = 2, 7

Timer = Callable[[Callable[[], None], torch.device], float]


def choose(target: Target, kernel: KernelOp, sizes: dict[str, int], tensors: Sequence[torch.Tensor] = ()) -> Schedule:
    """The schedule to compile for these sizes. Without tensors nothing is measured."""
    proposals = target.propose(kernel, sizes)
    if not proposals:
        raise NotImplementedError(f"{target.name} proposes no schedule for {kernel.sym_name.data} at {sizes}")
    if not config.autotune or not tensors or len(proposals) == 1:
        return proposals[0]
    key = tuning_key(target, kernel, sizes, tensors[0].device)
    known = load_schedule(key)
    if known is not None:
        return known
    best = measure(target, kernel, sizes, tensors, proposals)
    cache.store(KIND, key, to_text(best).encode())
    return best


def measure(
    target: Target,
    kernel: KernelOp,
    sizes: dict[str, int],
    tensors: Sequence[torch.Tensor],
    proposals: Sequence[Schedule],
    timer: Timer | None = None,
) -> Schedule:
    """The proposal that ran in the least time; one that does not compile or launch is passed over."""
    timer = timer or seconds
    copies = [t.clone() if t.is_contiguous() else _strided_copy(t) for t in tensors]
    symbols = [sizes[s.data] for s in kernel.symbol_names]
    times: list[tuple[float, int]] = []
    for place, schedule in enumerate(proposals):
        try:
            run = functools.partial(_run, target.compile(kernel, schedule), copies, symbols)
            times.append((timer(run, tensors[0].device), place))
        except Exception:  # out of registers, shared memory, or a block the compiler refuses
            continue
    return proposals[min(times)[1]] if times else proposals[0]


def _run(compiled: CompiledKernel, tensors: list[torch.Tensor], symbols: list[int]) -> None:
    compiled(tensors, symbols)


def _strided_copy(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides: kernels address memory, not tensors."""
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    memory = t.new_empty(extent)
    memory.copy_(t.as_strided((extent,), (1,)))
    return memory.as_strided(t.shape, t.stride())


def seconds(run: Callable[[], None], device: torch.device) -> float:
    """The median time of a run; on a GPU with a cold second-level cache each time."""
    for _ in range(WARM_UP):
        run()
    if device.type != "cuda":
        return statistics.median(_host_seconds(run) for _ in range(TURNS))
    with torch.cuda.device(device):
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        return statistics.median(_device_seconds(run, flush) for _ in range(TURNS))


def _host_seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _device_seconds(run: Callable[[], None], flush: torch.Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


# --- what is kept ---


def tuning_key(target: Target, kernel: KernelOp, sizes: dict[str, int], device: torch.device) -> str:
    """Everything that the fastest schedule depends on. Sizes count by class, so that neighbours share a winner."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    classes = {symbol: size_class(n) for symbol, n in sorted(sizes.items())}
    about = {"target": target.name, "device": name, "sizes": classes, "versions": _versions(), "format": FORMAT}
    return json.dumps(about, sort_keys=True) + str(kernel)


def size_class(n: int) -> str:
    """The power of two a size lies under, and whether vectors fit it."""
    return f"{max(n - 1, 0).bit_length()}{'a' if n % 16 == 0 else ''}"


@functools.cache
def _versions() -> dict[str, str]:
    versions = {}
    for package in ("tessera", "torch", "triton", "cuda-tile", "llvmlite"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = ""
    return versions


def to_text(schedule: Schedule) -> str:
    return json.dumps(asdict(schedule))


def from_text(text: str) -> Schedule:
    return read_schedule(json.loads(text))


def load_schedule(key: str) -> Schedule | None:
    """The stored winner; None if there is none, or if another version wrote something else."""
    data = cache.load(KIND, key)
    if data is None:
        return None
    try:
        return from_text(data.decode())
    except (ValueError, TypeError, KeyError):
        return None
