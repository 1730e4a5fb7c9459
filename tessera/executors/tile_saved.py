"""The callables of regions as data, so that a later process need not lower or emit their kernels again.

In: what the tile executor made of a region. Out: where the kernel's buffers stand among the region's values, and the
target's own account of the compiled kernel; and back, for a region of the same form. A kernel whose target keeps
nothing, or only for known sizes, is not saved: it is made anew from the region.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.ir.equation import Value
from tessera.ir.trace import Trace
from tessera.tile.from_trace import Around, lower
from tessera.tile.from_trace_launch import launcher
from tessera.tile.targets import target_for


def save(launch: Callable) -> dict | None:
    lowered, body = getattr(launch, "lowered", None), getattr(launch, "body", None)
    if lowered is None or body is None:
        return None
    target = target_for(lowered.stored[0].tensor.device)
    keep = getattr(target, "save", None)
    kernel = None if keep is None else keep(launch.compiled)  # type: ignore[attr-defined]
    if kernel is None:
        return None
    number = {v: i for i, v in enumerate(_values(body))}
    place = {eqn: i for i, eqn in enumerate(body.equations)}
    return {
        "inputs": [number[v] for v in lowered.inputs],
        "stored": [number[v] for v in lowered.stored],
        "symbols": list(lowered.symbols),
        "tail": [place[eqn] for eqn in lowered.tail],
        "kernel": kernel,
    }


def restore(body: Trace, data: dict) -> Callable | None:
    values = _values(body)
    around = Around(
        tuple(values[i] for i in data["inputs"]),
        tuple(values[i] for i in data["stored"]),
        tuple(data["symbols"]),
        tuple(body.equations[i] for i in data["tail"]),
    )
    device = around.stored[0].tensor.device
    load = getattr(target_for(device), "load", None)
    kernel = None if load is None else load(data["kernel"], lambda: lower(body, body.name).kernel)
    if kernel is None:
        return None
    launch = launcher(body, around, kernel)
    launch.writing = lambda over: launcher(body, around, kernel, over)  # type: ignore[attr-defined]
    if (begin := getattr(kernel, "ahead", None)) is not None and torch.cuda.is_available():
        begin(device)
    return launch


def _values(body: Trace) -> list[Value]:
    return [*body.inputs, *(v for eqn in body.equations for v in eqn.results())]
