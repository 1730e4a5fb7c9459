"""The callables of regions as data, so that a later process need not lower or emit their kernels again.

In: what the tile executor made of a region. Out: where the kernel's buffers stand among the region's values, and the
target's own account of the compiled kernel; and back, for a region of the same form. A kernel whose target keeps
nothing, or only for known sizes, is not saved: it is made anew from the region.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tessera.ir.equation import Recipe, Value
from tessera.ir.kernel import Kernel
from tessera.ir.trace import Trace
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.from_trace.around import read_around, write_around
from tessera.tile.from_trace.batch import flat_kernel
from tessera.tile.from_trace.kernel import TileKernel
from tessera.tile.from_trace.launch import launcher
from tessera.tile.from_trace.region import lower
from tessera.tile.from_trace.segments import OneByOne, Segment
from tessera.tile.from_trace.segments import launcher as batch_launcher
from tessera.tile.targets import CompiledKernel, Target, target_for
from tessera.tile.targets.base import Ahead, Batches, Keeps, Run


def save(kernel: Kernel) -> dict | None:
    if not isinstance(kernel, TileKernel):
        return None
    return _save_batch(kernel) if kernel.segments else _save_region(kernel)


def restore(recipe: Recipe, data: dict) -> Kernel | None:
    return _restore_batch(recipe, data) if "segments" in data else _restore_region(recipe.body, data)


# --- one region ---


def _save_region(kernel: TileKernel) -> dict | None:
    lowered, body = kernel.lowered, kernel.body
    saved = _saved(_target(lowered.stored[0]), kernel.compiled)  # type: ignore[arg-type]
    if saved is None:
        return None
    return {**write_around(body, lowered), "kernel": saved}


def _restore_region(body: Trace, data: dict) -> Kernel | None:
    around = read_around(body, data)
    target = _target(around.stored[0])
    kernel = target.load(data["kernel"], lambda: lower(body, body.name).kernel) if isinstance(target, Keeps) else None
    if kernel is None:
        return None
    compile_ahead(kernel, around.stored[0].tensor.device)
    return replace(launcher(body, around, kernel), writing=lambda over: launcher(body, around, kernel, over))


def compile_ahead(kernel: CompiledKernel, device: torch.device) -> None:
    """Where the target compiles in the background, let it begin before the first call."""
    if isinstance(kernel, Ahead) and torch.cuda.is_available():
        kernel.ahead(device)


def _saved(target: Target | None, compiled: CompiledKernel) -> dict | None:
    return target.save(compiled) if isinstance(target, Keeps) else None


def _target(v: Value) -> Target | None:
    return target_for(v.tensor.device)


# --- several in one launch ---


def _save_batch(kernel: TileKernel) -> dict | None:
    target, run = _target(kernel.lowered.stored[0]), kernel.compiled
    saved = None
    if isinstance(run, OneByOne):
        saved = _saved(target, run.compiled)
    elif isinstance(target, Batches):
        saved = target.save_batch(run, max(s.length for s in kernel.segments))  # type: ignore[arg-type]
    if saved is None:
        return None
    segments = [[s.inputs, s.outputs, s.length] for s in kernel.segments]
    return {"segments": segments, "kernel": saved, "alone": isinstance(run, OneByOne)}


def _restore_batch(recipe: Recipe, data: dict) -> Kernel | None:
    whole: Trace = recipe.body
    target = _target(whole.outputs[0])  # type: ignore[arg-type]
    run: Run | None = None

    def kernel() -> KernelOp:
        return flat_kernel(recipe.parts[0], whole.name).kernel

    if data["alone"]:
        compiled = target.load(data["kernel"], kernel) if isinstance(target, Keeps) else None
        run = None if compiled is None else OneByOne(compiled)
    elif isinstance(target, Batches):
        run = target.load_batch(data["kernel"], kernel)
    if run is None:
        return None
    segments = [Segment(tuple(inputs), tuple(outputs), length) for inputs, outputs, length in data["segments"]]

    def over(places: dict[int, int]) -> Kernel:
        return Kernel(run=batch_launcher(whole, segments, run, places))

    return replace(over({}), writing=over)
