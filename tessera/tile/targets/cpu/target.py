"""The CPU target: kernels through LLVM, in this process, with no C++ compiler.

`compile` turns a kernel and a schedule into a callable; the same kernel text and schedule are compiled once a process,
and their object code once a machine. `source` is the LLVM text as it was written, before any optimisation. Where a
schedule shares one reduction or sequential axis out (`split`), two kernels run one after the other. Into how many parts
is said by the schedule, never by the number of threads: results do not depend on those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tessera.machines import Machine
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.rewrites.offline import without_reduce_exp
from tessera.tile.rewrites.online import with_reduce_exp
from tessera.tile.rewrites.split_kernel import Split
from tessera.tile.rewrites.split_sequential import split
from tessera.tile.schedules.schedule import Schedule, inner_axis, reduced_axis
from tessera.tile.targets.base import CompiledKernel
from tessera.tile.targets.cpu import jit
from tessera.tile.targets.cpu.choose import choose, proposals
from tessera.tile.targets.cpu.entry import entry
from tessera.tile.targets.cpu.host import Host
from tessera.tile.targets.cpu.host import host as this_host
from tessera.tile.targets.cpu.layout import layout
from tessera.tile.targets.cpu.lower import Lowering
from tessera.tile.targets.cpu.process import openmp
from tessera.tile.targets.cpu.product import no_product
from tessera.tile.targets.pair import Pair, read_scratch
from tessera.util import disk as cache

KIND = "cpu"  # of what is kept on disk


@dataclass(frozen=True, slots=True)
class CpuKernel:
    """Call it with tensors and sizes; `by_address` takes the tensors' addresses directly."""

    source: str  # empty where the object came from the cache without it
    by_address: Callable[..., None]
    alive: object
    host: Host
    name: str
    kept: str  # what the object is kept under, on disk

    def __call__(self, tensors: Sequence[torch.Tensor], symbols: Sequence[int] = ()) -> None:
        self.by_address(*[t.data_ptr() for t in tensors], *symbols)

    def assembly(self) -> str:
        """What the machine runs."""
        return jit.assembly(self.source, self.host)


class CpuTarget:
    name = "cpu"

    def __init__(self, machine: Machine | None = None, host: Host | None = None) -> None:
        """For this machine, or for a lesser one that this machine can run."""
        self._described, self._host = machine, host
        self._compiled: dict[str, CpuKernel | Pair[CpuKernel]] = {}

    @functools.cached_property
    def host(self) -> Host:
        return self._host or replace(this_host(), described=self._described)

    @property
    def machine(self) -> Machine:
        return self.host.machine

    def compile(self, kernel: KernelOp, schedule: Schedule) -> CpuKernel | Pair[CpuKernel]:
        if inner_axis(kernel) is not None:
            raise NotImplementedError("the CPU target has no kernels that contract inside a loop; the library does")
        key = f"{schedule}\n{kernel}"
        compiled = self._compiled.get(key)
        if compiled is None:
            build = _build_halves if schedule.split > 1 else _build
            compiled = self._compiled[key] = build(kernel, schedule, self.host)
        return compiled

    def about(self) -> str:
        return f"{jit.version(self.host)} {openmp()}"

    def save(self, compiled: CompiledKernel) -> dict | None:
        if isinstance(compiled, CpuKernel):
            return _save(compiled)
        if not isinstance(compiled, Pair) or compiled.symbols:
            return None
        return {"halves": [_save(compiled.first), _save(compiled.second)], "scratch": compiled.saved_scratch()}

    def load(self, data: dict, kernel: Callable[[], KernelOp]) -> CpuKernel | Pair[CpuKernel] | None:
        if "halves" not in data:
            return _load(data, self.host)
        first, second = (_load(half, self.host) for half in data["halves"])
        return None if first is None or second is None else Pair.restored(first, second, read_scratch(data["scratch"]))

    def propose(self, kernel: KernelOp, sizes: dict[str, int]) -> list[Schedule]:
        return proposals(kernel, sizes, self.host)

    def no_sums_over_rows(self, row: int | None) -> str:
        return ""

    def no_product(self, rows: int, columns: int, depth: int) -> str:
        return no_product(rows, columns, depth, self.host)


def _build(kernel: KernelOp, schedule: Schedule, host: Host) -> CpuKernel:
    source, key, code = object_of(kernel, schedule, host)
    name = kernel.sym_name.data
    function, alive = jit.link(code, name)
    return CpuKernel(source, function, alive, host, name, cache.digest(key))


def object_of(kernel: KernelOp, schedule: Schedule, host: Host) -> tuple[str, str, bytes]:
    """The LLVM text of a kernel, what its object is kept under, and the object: for a host that may be another."""
    source = module_text(kernel, schedule, host)
    # The text stands for the kernel, the schedule and this package's own version; the rest is the host and LLVM.
    key = f"{jit.version(host)}\n{source}"
    code = cache.load(KIND, key)
    if code is None:
        code = jit.object_code(source, host)
        cache.store(KIND, key, code)
    return source, key, code


def _save(kernel: CpuKernel) -> dict:
    return {"name": kernel.name, "object": kernel.kept}


def _load(data: dict, host: Host) -> CpuKernel | None:
    code = cache.load_digest(KIND, data["object"])
    if code is None:
        return None
    function, alive = jit.link(code, data["name"])
    return CpuKernel("", function, alive, host, data["name"], data["object"])


def _build_halves(kernel: KernelOp, schedule: Schedule, host: Host) -> Pair[CpuKernel]:
    halves, first, second = in_halves(kernel, schedule, host)
    return Pair(kernel, halves, _build(*first, host), _build(*second, host))


def in_halves(
    kernel: KernelOp, schedule: Schedule, host: Host
) -> tuple[Split, tuple[KernelOp, Schedule], tuple[KernelOp, Schedule]]:
    """A kernel whose schedule shares an axis out, as two kernels, each with its schedule."""
    halves = split(kernel, schedule.split)
    start = without_reduce_exp(halves.first) if _row_stays(halves.first, host) else halves.first
    return halves, (start, replace(schedule, split=1)), (halves.second, Schedule())


def _row_stays(kernel: KernelOp, host: Host) -> bool:
    """The caches hold a row between loops: a second loop then costs less than lanes that wait for a running maximum."""
    axis = reduced_axis(kernel)
    size = None if axis is None else kernel.axis(axis).size.expr.constant
    return size is not None and 4 * size <= host.cached


def module_text(kernel: KernelOp, schedule: Schedule, host: Host) -> str:
    """The whole LLVM module of a kernel."""
    seen = layout(kernel if _row_stays(kernel, host) else with_reduce_exp(kernel, private=True))
    choice = choose(seen, schedule, host)
    lowering = Lowering(seen, choice, host)
    function = lowering.function()
    start = entry(seen, choice, host, openmp())
    declared = [d for n, d in lowering.b.declared.items() if d not in start and n not in lowering.b.helpers]
    return "\n".join(
        [
            f"; {kernel.sym_name.data}: lanes along {choice.vector}, {choice.lanes} at a time",
            f'target triple = "{host.triple}"',
            *declared,
            *lowering.b.helpers.values(),
            function,
            start,
            f"attributes #0 = {{ {' '.join(['nounwind', *host.attributes])} }}",
            "",
        ]
    )
