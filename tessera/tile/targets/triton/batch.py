"""One launch for many segments: the same kernel over buffers of different lengths, found through a table.

The emitted body takes its program's number as an argument. Around it stands a kernel that looks up which segment its
program belongs to, and which block of it (`places`, two numbers a program), then the segment's length and pointers
(`table`, one row a segment), and calls the body. Pointers of whole buffers are known to be 16-byte aligned and lengths
to be multiples of 16 where all of them are, so that accesses stay as wide as in a kernel of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from xdsl.dialects.builtin import StringAttr

from tessera.tile.dialect.ops import KernelOp, LoadOp, StoreOp
from tessera.tile.dialect.types import element_of
from tessera.tile.schedules.schedule import Schedule, read_schedule
from tessera.tile.targets.triton.emit import Options, emit
from tessera.tile.targets.triton.functions import type_name
from tessera.tile.targets.triton.launch import load_module
from tessera.tile.targets.triton.layout import layout, needs_wide

ALIGNED = 16
SPARE = 32  # tables kept for CUDA graphs, one a capture


def emit_batch(kernel: KernelOp, schedule: Schedule, wide: bool, aligned: bool) -> str:
    """The module's text: the body as a device function, and the kernel that calls it for its segment."""
    inner = kernel.clone()
    inner.properties["sym_name"] = StringAttr(f"_{kernel.sym_name.data}")
    text = emit(inner, schedule, Options(wide=wide))
    head, signature = text.split("@triton.jit\ndef _" + kernel.sym_name.data + "(", 1)
    args, rest = signature.split("):\n", 1)
    body = rest.split("\n\n\ndef grid(")[0].replace("tl.program_id(0)", "program")
    names = args.split(", ")
    buffers = kernel.buffers
    lines = ["number = tl.program_id(0)", "segment = tl.load(places + 2 * number).to(tl.int64)"]
    lines += ["program = tl.load(places + 2 * number + 1)", f"row = table + segment * {len(buffers) + 1}"]
    lines.append(f"{names[-1]} = tl.load(row)")
    if not wide:
        lines.append(f"{names[-1]} = {names[-1]}.to(tl.int32)")
    if aligned:
        lines.append(f"{names[-1]} = tl.multiple_of({names[-1]}, {ALIGNED})")
    for k, buffer in enumerate(buffers):
        pointer = f"tl.load(row + {k + 1}).to(tl.pointer_type({_stored(buffer)}))"
        whole = aligned and _varies(kernel, buffer)
        lines.append(f"{names[k]} = " + (f"tl.multiple_of({pointer}, {ALIGNED})" if whole else pointer))
    lines.append(f"_{kernel.sym_name.data}({args}, program)")
    around = "\n".join(f"    {line}" for line in lines)
    return (
        f"{head}@triton.jit\ndef _{kernel.sym_name.data}({args}, program):\n{body}\n\n\n"
        f"@triton.jit\ndef {kernel.sym_name.data}(table, places):\n{around}\n"
    )


def _stored(buffer) -> str:
    """How elements lie in memory: truth values are bytes."""
    name = type_name(element_of(buffer))
    return "tl.int8" if name == "tl.int1" else name


def _varies(kernel: KernelOp, buffer) -> bool:
    """One element for every point; a number alone is not aligned to more than itself."""
    (axis,) = kernel.axis_names()
    return any(
        axis in op.at.expr.names()
        for op in kernel.block.ops
        if isinstance(op, (LoadOp, StoreOp)) and op.buffer is buffer
    )


@dataclass(frozen=True)
class _SentTable:
    """What a launch needs on the device; kept as long as addresses stay."""

    table: torch.Tensor
    rows: list[list[int]]


class BatchLauncher:
    """Call it with the buffers of every segment, in the kernel's order, and the segments' lengths."""

    def __init__(self, kernel: KernelOp, schedule: Schedule) -> None:
        (block,) = (d.block for d in layout(kernel, schedule).parallel)
        buffers = [_varies(kernel, b) for b in kernel.buffers]
        self._begin(kernel.sym_name.data, block, buffers, schedule, lambda: kernel)

    def _begin(
        self, name: str, block: int, buffers: list[bool], schedule: Schedule, kernel: Callable[[], KernelOp]
    ) -> None:
        self.name, self.block, self.buffers, self.schedule, self._lower = name, block, buffers, schedule, kernel
        self._texts: dict[tuple[bool, bool], str] = {}
        self._wide: dict[int, bool] = {}  # by the longest segment
        self._functions: dict[tuple[bool, bool], Callable] = {}
        self._places: dict[tuple, torch.Tensor] = {}
        self._tables: dict[tuple, _SentTable] = {}
        self._spare: dict[tuple, list[torch.Tensor]] = {}  # tables for graphs to come

    @functools.cached_property
    def kernel(self) -> KernelOp:
        return self._lower()

    @property
    def source(self) -> str:
        return self._text(False, True)

    def _text(self, wide: bool, aligned: bool) -> str:
        if (wide, aligned) not in self._texts:
            self._texts[wide, aligned] = emit_batch(self.kernel, self.schedule, wide, aligned)
        return self._texts[wide, aligned]

    def _needs_wide(self, longest: int) -> bool:
        if longest not in self._wide:
            self._wide[longest] = needs_wide(self.kernel, {self.kernel.symbol_names.data[0].data: longest})
        return self._wide[longest]

    # --- as data ---

    def saved(self, longest: int) -> dict:
        """What launches with segments of up to this length need, so that nothing is lowered or emitted for them."""
        wide = self._needs_wide(longest)
        return {
            "name": self.name,
            "block": self.block,
            "buffers": self.buffers,
            "schedule": asdict(self.schedule),
            "longest": longest,
            "wide": wide,
            "texts": [[aligned, self._text(wide, aligned)] for aligned in (True, False)],
        }

    @staticmethod
    def restored(data: dict, kernel: Callable[[], KernelOp]) -> BatchLauncher:
        instance = BatchLauncher.__new__(BatchLauncher)
        instance._begin(data["name"], data["block"], data["buffers"], read_schedule(data["schedule"]), kernel)
        instance._wide = {data["longest"]: data["wide"]}
        instance._texts = {(data["wide"], aligned): text for aligned, text in data["texts"]}
        return instance

    def __call__(self, rows: Sequence[Sequence[torch.Tensor]], lengths: Sequence[int]) -> None:
        device = rows[0][0].device
        sizes = tuple(lengths)
        table = [[n, *(t.data_ptr() for t in row)] for row, n in zip(rows, lengths, strict=True)]
        aligned = self._aligned(table)
        wide = self._needs_wide(max(sizes))
        places = self._places.get((device, sizes))
        if places is None:
            places = self._places[device, sizes] = self._make_places(sizes, device)
        function = self._function(wide, aligned)
        on_device = self._table(table, device, sizes)
        options = {"num_warps": self.schedule.warps, "num_stages": self.schedule.stages}
        if device.type != "cuda":
            function[(len(places) // 2,)](on_device, places, **options)
            return
        with torch.cuda.device(device):
            function[(len(places) // 2,)](on_device, places, **options)

    def _function(self, wide: bool, aligned: bool) -> Callable:
        if (wide, aligned) not in self._functions:
            self._functions[wide, aligned] = getattr(load_module(self._text(wide, aligned), self.name), self.name)
        return self._functions[wide, aligned]

    def _aligned(self, table: list[list[int]]) -> bool:
        return all(
            row[0] % ALIGNED == 0
            and all(p % ALIGNED == 0 for p, whole in zip(row[1:], self.buffers, strict=True) if whole)
            for row in table
        )

    def _make_places(self, lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """For every program, its segment and its block in it."""
        blocks = torch.tensor([-(-n // self.block) for n in lengths], dtype=torch.int32)
        segment = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), blocks)
        starts = torch.cumsum(blocks, 0) - blocks
        within = torch.arange(len(segment), dtype=torch.int32) - starts[segment.long()].int()
        return _sent(torch.stack((segment, within), 1).flatten().contiguous(), device)

    def _table(self, rows: list[list[int]], device: torch.device, sizes: tuple[int, ...]) -> torch.Tensor:
        host = torch.tensor(rows, dtype=torch.int64)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._for_a_graph(host, device, sizes)
        key = device, sizes, rows[0][1]
        known = self._tables.get(key)
        if known is not None and known.rows == rows:
            return known.table
        if (device, sizes) not in self._spare:
            self._spare[device, sizes] = list(torch.empty((SPARE, *host.shape), dtype=host.dtype, device=device))
        table = _sent(host, device)
        if len(self._tables) > 64:
            self._tables.clear()
        self._tables[key] = _SentTable(table, rows)
        return table

    def _for_a_graph(self, host: torch.Tensor, device: torch.device, sizes: tuple[int, ...]) -> torch.Tensor:
        """A table that a graph reads whenever it is replayed, written now and not by the graph.

        It lies outside of the graph's own memory, which kernels before this one may use for something else.
        """
        if not self._spare.get((device, sizes)):
            raise RuntimeError(f"{self.name}: no table is left for another CUDA graph of these sizes")
        table = self._spare[device, sizes].pop()
        beside = torch.cuda.Stream(device)
        with torch.cuda.stream(beside):
            table.copy_(host, non_blocking=True)
        beside.synchronize()
        return table


def _sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, in the order of the current stream, without waiting for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
