"""What stands behind the calls of a claimed program, as files.

In: a trace after claiming, and how the names of its files begin. Out: for every region that the tile compiler runs, its
tile program (`.mlir`, which `tessera tile-opt` and `tessera.register_kernel` read) and its kernel (`.ll`, or `.py`).
"""

from __future__ import annotations

from tessera.ir.equation import Special
from tessera.ir.trace import Trace
from tessera.tile.dialect.text import to_text
from tessera.tile.from_trace.kernel import TileKernel


def dump_kernels(trace: Trace, start: str) -> None:
    """Files `START_region_0.mlir` and `START_region_0.ll`, one pair a region."""
    for op in dict.fromkeys(eqn.op for eqn in trace.equations if isinstance(eqn.op, Special)):
        if not isinstance(op.kernel, TileKernel):
            continue
        _write(f"{start}_{op.name}.mlir", to_text(op.kernel.tile) + "\n")
        if text := op.kernel.text:
            _write(f"{start}_{op.name}{'.ll' if 'target triple' in text else '.py'}", text)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
