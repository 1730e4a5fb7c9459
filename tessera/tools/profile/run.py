"""`tessera.profile`: run a compiled function some steps and say where the time of a step goes.

In: a jitted callable and arguments. Out: a `Profile`. Steps are run as they are first, to know what a step costs, and
then with instrumented programs in place. Every part of a step is told by its median over those: what disturbs one
step does not count. The spans are those of the fastest.
The function runs for real: buffers it writes and random numbers it draws move on. Gradients are computed and dropped.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch

from tessera.inspection.work import main_device
from tessera.just_in_time.compiled import compiled_state
from tessera.machines.measure import rates
from tessera.tools.profile.gradients import pull
from tessera.tools.profile.instrument import Labelled, Log, clocked, in_place, labelled, ranged
from tessera.tools.profile.result import Profile, Rates
from tessera.tools.profile.rows import Programs, rows_of, spans_of
from tessera.tools.profile.sample import STEP, Step, from_log, from_torch_profile
from tessera.util.errors import InputError, TesseraError


def profile(
    fast: Callable, /, *args: object, steps: int = 10, backward: bool | None = None, **kwargs: object
) -> Profile:
    """Time of every equation of `fast(*args, **kwargs)`'s programs, against the roofline of the machine.

    steps     how many are measured
    backward  run a backward after each forward; by default where the result requires grad
    """
    state = compiled_state(fast)
    if state is None:
        raise InputError(
            f"expected what tessera.jit gave, got {type(fast).__name__}; try tessera.profile(tessera.jit(f), …)"
        )

    def step() -> None:
        out = fast(*args, **kwargs)
        if backward is not False and not pull(out) and backward:
            raise InputError("backward=True, but no result requires grad")

    step()  # compiles
    compilations = state.compilations()
    if not compilations:
        raise InputError("nothing of this function was compiled; tessera.explain says why")
    measured = measure(step, labelled(compilations), steps)
    state.floor = measured.floor  # `explain` tells it
    return measured


def measure(step: Callable[[], None], compilations: list[Labelled], steps: int) -> Profile:
    """Where the time of `step()`, which calls these compilations, goes."""
    if steps < 1:
        raise InputError(f"expected at least 1 step, got {steps}")
    step()  # warms up
    device = main_device(p.trace for c, _ in compilations for p in c.account.programs)
    plain = _plain(step, steps, device)
    programs, measured = (_on_gpu if device.type == "cuda" else _on_cpu)(compilations, step, steps)
    return _profile(programs, measured, plain, device, steps)


def _plain(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Seconds of a step with nothing measured inside: the median."""
    taken = []
    for _ in range(steps):
        _wait(device)
        start = time.perf_counter()
        step()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _on_cpu(compilations: list[Labelled], step: Callable[[], None], steps: int) -> tuple[Programs, list[Step]]:
    log: Log = []
    measured: list[Step] = []
    collecting = gc.isenabled()
    with in_place(compilations, clocked(log)) as programs:
        step()
        gc.disable()
        try:
            for _ in range(steps):
                log.clear()
                start = time.perf_counter_ns()
                step()
                measured.append(from_log(log, start, time.perf_counter_ns()))
        finally:
            if collecting:
                gc.enable()
    return programs, measured


def _on_gpu(compilations: list[Labelled], step: Callable[[], None], steps: int) -> tuple[Programs, list[Step]]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with in_place(compilations, ranged) as programs:
        step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(steps):
                with torch.profiler.record_function(STEP):
                    step()
                    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    # The range of a step is also shown on the GPU's own track: only the host's counts.
    sampled = from_torch_profile([e for e in events if e.get("cat") != "gpu_user_annotation"])
    if not any(step.kernels for step in sampled):
        raise TesseraError(
            "PyTorch's profiler saw no kernels on the GPU; it needs CUPTI, and no other profiler at the same time"
        )
    return programs, sampled


def _profile(programs: Programs, measured: list[Step], plain: float, device: torch.device, steps: int) -> Profile:
    machine = rates(device)
    rows = rows_of(programs, measured, machine)
    if not rows:
        raise InputError("no compiled program ran in these steps; was the function called with other arguments before?")
    shown = min(measured, key=lambda step: step.seconds)
    busy = [step.busy() for step in measured]
    between = median(step.seconds - step.inside() for step in measured)
    outside = [sum(r.seconds for r in step.kernels if r.equation is None) for step in measured]
    gaps = sorted(shown.busy()[1], key=lambda gap: -gap[1])
    return Profile(
        tuple(rows),
        tuple(spans_of(programs, shown, rows)),
        steps,
        plain,
        sum(row.host_seconds for row in rows) + between,
        median(total for total, _ in busy),
        median(outside),
        median(sum(seconds for _, seconds in all_gaps) for _, all_gaps in busy),
        tuple(gaps[:100]),
        Rates(_device_name(device), machine.bandwidth, machine.flops, machine.matrix_flops),
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
