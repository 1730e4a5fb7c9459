"""The module around a kernel's lines: what a reader sees first, the imports, the helpers, the grid and a launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xdsl.ir import SSAValue

from tessera.tile.dialect.ops import REDUCE, KernelOp, LoadOp, StoreOp
from tessera.tile.dialect.types import element_of
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.triton.functions import helpers
from tessera.tile.targets.triton.layout import Layout
from tessera.tile.targets.triton.spaces import Places
from tessera.tile.targets.triton.unroll import BLOCKS


def module_text(
    kernel: KernelOp,
    schedule: Schedule,
    layout: Layout,
    function: str,
    buffers: Mapping[SSAValue, str],
    places: Places,
    lines: Sequence[str],
    bulk: Mapping[str, str] | None = None,
) -> str:
    """`bulk`: names of descriptors, which come between buffers and symbols, and the text that makes each."""
    symbols = list(places.symbols.values())
    args = ", ".join([*buffers.values(), *symbols])
    params = ", ".join([*buffers.values(), *(bulk or ()), *symbols])
    passed = ", ".join([*buffers.values(), *([f"*descriptors({args})"] if bulk else []), *symbols])
    body = "\n".join(f"    {line}" for line in lines) or "    pass"
    used = helpers(body)
    library = "\nfrom triton.language.extra import libdevice" if "libdevice." in body + used else ""
    library += "\nfrom triton.tools.tensor_descriptor import TensorDescriptor" if bulk else ""
    entries = "".join(f"        {text},\n" for text in (bulk or {}).values())
    described = f"def descriptors({args}):\n    return (\n{entries}    )\n\n\n" if bulk else ""
    programs = f"grid({', '.join(symbols)})"
    if schedule.persistent:
        library = "\nimport torch" + library
        first = next(iter(buffers.values()))
        units = f"torch.cuda.get_device_properties({first}.device).multi_processor_count"
        programs = f"(min({programs}[0], {units}),)"
    return f'''"""{summary(kernel, schedule, buffers)}
"""

import triton
import triton.language as tl{library}
{used}

@triton.jit
def {function}({params}):
{body}


{described}def grid({", ".join(symbols)}):
    return ({places.size(layout.programs)},)


def launch({args}):
    {function}[{programs}]({passed}, num_warps={schedule.warps}, num_stages={schedule.stages})
'''


def summary(kernel: KernelOp, schedule: Schedule, buffers: Mapping[SSAValue, str]) -> str:
    """What the kernel reads, computes and writes, and how it is scheduled."""
    axes = [f"{a.axis.data} < {a.size.expr}" + (" reduced" if a.kind.data == REDUCE else "") for a in kernel.axes]
    lines = [f"{kernel.sym_name.data}, written by Tessera from a tile kernel.", ""]
    lines += [f"Axes: {', '.join(axes) or 'none'}"]
    for buffer, name in buffers.items():
        reads = [op.at.text.data for op in kernel.block.ops if isinstance(op, LoadOp) and op.buffer is buffer]
        writes = [op.at.text.data for op in kernel.block.ops if isinstance(op, StoreOp) and op.buffer is buffer]
        uses = [f"read at {', '.join(dict.fromkeys(reads))}"] if reads else []
        uses += [f"written at {', '.join(dict.fromkeys(writes))}"] if writes else []
        lines.append(f"  {name}: {element_of(buffer)}, {'; '.join(uses) or 'not used'}")
    blocks = ", ".join(f"{key}={n}" for key, n in schedule.blocks) or "one element"
    several = dict(schedule.extra).get(BLOCKS, 1)
    how = "walked in blocks" if schedule.loop else "in one block"
    how += f", {several} a step" if schedule.loop and several != 1 else ""
    reduced = f"; {kernel.axis_names(REDUCE)[0]} {how}" if kernel.axis_names(REDUCE) else ""
    lines.append(f"Schedule: blocks {blocks}{reduced}; {schedule.warps} warps, {schedule.stages} stages")
    return "\n".join(lines)
