"""The kernels behind a program's regions: their text, from the tile program to what runs. Equal kernels stand once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tessera.ir.equation import Equation, Special
from tessera.ir.kernel import Kernel
from tessera.tile.dialect.text import to_text
from tessera.tile.from_trace.kernel import TileKernel
from tessera.tile.schedules.schedule import Schedule
from tessera.tools.profile.rows import executor_of, operator_of


@dataclass
class Kernels:
    """A table of kernels; a callable that several regions share is one kernel."""

    entries: list[dict[str, object]] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)
    alive: list[Callable] = field(default_factory=list)  # an id names its callable only while that lives

    def number(self, eqn: Equation) -> int:
        """The kernel of an equation, or -1 where an operator runs it."""
        if not isinstance(eqn.op, Special) or eqn.op.body is None:
            return -1
        fn = eqn.op.fn
        if id(fn) not in self.known:
            self.known[id(fn)] = len(self.entries)
            self.alive.append(fn)
            self.entries.append(_entry(eqn, eqn.op.kernel, len(self.entries)))
        return self.known[id(fn)]


def _entry(eqn: Equation, kernel: Kernel | None, number: int) -> dict[str, object]:
    ours = kernel if isinstance(kernel, TileKernel) else None
    source = "" if ours is None else ours.text
    return {
        "name": f"{executor_of(eqn)} kernel {number}",
        "executor": executor_of(eqn),
        "operators": operator_of(eqn),
        "language": _language(source),
        "source": source,
        "tile": "" if ours is None else to_text(ours.tile),
        "launch": "" if kernel is None else kernel.source,
        "schedule": "" if ours is None else _schedule(ours.schedule, _language(source)),
    }


def _language(source: str) -> str:
    """What a kernel is written in, told by how it begins to speak."""
    if not source:
        return ""
    if "@triton.jit" in source:
        return "Triton"
    return "LLVM IR" if "target triple" in source else "cuTile"


def _schedule(schedule: Schedule, language: str) -> str:
    """How a kernel is run. Warps and stages are a GPU's: a kernel in LLVM IR has none."""
    blocks = " × ".join(f"{axis} {size}" for axis, size in schedule.blocks)
    parts = [f"blocks {blocks}" if blocks else ""]
    parts += [] if language == "LLVM IR" else [f"{schedule.warps} warps", f"{schedule.stages} stages"]
    parts += [name for name in ("loop", "persistent") if getattr(schedule, name)]
    parts += [f"split {schedule.split}"] if schedule.split > 1 else []
    parts += [f"{name} {value}" for name, value in schedule.extra]
    return ", ".join(filter(None, parts))
