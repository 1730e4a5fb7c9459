"""Keeps proposals within the shared memory of a machine, before anything is compiled.

In: a kernel and schedules for it. Out: those whose loads ahead fit, with fewer stages where that is what it takes. How
much Triton allocates was read off compiled kernels: operands of matrix units that read shared memory have a buffer a
stage, other loads of a loop one fewer, and without a product none before the third stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from tessera.machines import Machine
from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.ops import ContractOp, KernelOp, LoadOp, StoreOp
from tessera.tile.dialect.types import element_of
from tessera.tile.schedules.schedule import Schedule, inner_axis, reduced_axis
from tessera.tile.targets.triton.unroll import BLOCKS
from tessera.util.powers import power_of_two

EXCHANGED = 4096  # bytes that reductions and changes of layout take beside the loads
READS_SHARED = (9, 10)  # generations whose matrix units read operands of 16 bits where the copy put them


def fitting(kernel: KernelOp, schedules: Iterable[Schedule], machine: Machine) -> list[Schedule]:
    room = machine.size("shared_block")
    fit = []
    for schedule in schedules:
        stages = [n for n in range(schedule.stages, 1, -1) if shared(kernel, schedule, n, machine) <= room]
        if stages or schedule.stages < 2:
            fit.append(schedule if schedule.stages < 2 else replace(schedule, stages=stages[0]))
    return fit


def shared(kernel: KernelOp, schedule: Schedule, stages: int, machine: Machine) -> int:
    """Bytes of shared memory that a program takes with so many stages, about."""
    along = reduced_axis(kernel) if schedule.loop else kernel.sequential_axis
    products = [op for op in kernel.block.ops if isinstance(op, ContractOp)]
    operands = {v for op in products for v in (op.lhs, op.rhs)}
    total = 0
    for op in kernel.block.ops:
        if not isinstance(op, LoadOp) or along is None:
            continue
        size = _tile(kernel, schedule, op)
        if along not in op.at.expr.names():
            total += size if op.result in operands else 0
        elif not products:
            total += size * _extra(schedule, BLOCKS) * (stages - 1 if stages > 2 else 0)
        else:
            stays = machine.capability // 10 in READS_SHARED and torch_dtype(element_of(op.buffer)).itemsize <= 2
            total += size * (stages if stays else stages - 1)
    if schedule.persistent:  # a tile is stored while the next one's operands come
        stores = sum(_tile(kernel, schedule, op) for op in kernel.block.ops if isinstance(op, StoreOp))
        total += stores // _extra(schedule, "parts")
    return total + EXCHANGED if total else 0


def _extra(schedule: Schedule, name: str) -> int:
    value = dict(schedule.extra).get(name, 1)
    assert isinstance(value, int)
    return value


def _tile(kernel: KernelOp, schedule: Schedule, op: LoadOp | StoreOp) -> int:
    """Bytes of the block that an access moves."""
    names, inner = op.at.expr.names(), inner_axis(kernel)
    elements = math.prod(block for key, block in schedule.blocks if names & set(key.split()))
    if inner in names and inner is not None:
        size = kernel.axis(inner).size.expr.constant
        elements *= power_of_two(size) if size else 1
    return elements * torch_dtype(element_of(op.buffer)).itemsize
