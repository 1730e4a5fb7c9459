"""Memory over time, predicted and measured, equation by equation.

Predicted: what the final program's lifetimes say. Measured: the program is run once more, one equation at a time, on
made-up inputs of the same types, and the allocator is asked: CUDA's statistics, or the CPU allocator's own events as
the profiler reports them, so that what a kernel allocates for itself counts too. Inputs are not counted, but for what
forward saved for backward alone: that is there when backward begins, and dies in it. Nor is what waits on the host, as
far as the host is not what is measured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from tessera.executors.aten import bind
from tessera.inspection.examples import example_inputs
from tessera.inspection.step import step
from tessera.ir.equation import Equation, Value
from tessera.ir.printer import operator_name
from tessera.ir.schema import COLLECTIVES
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.passes.memory.offload import handed_over
from tessera.passes.memory.schedule import live_bytes
from tessera.pipeline.compilation import Compilation

_MARK = "tessera equation "


@dataclass(frozen=True)
class Timeline:
    """Bytes alive during each equation and after it, and where they were most."""

    during: tuple[int, ...]
    after: tuple[int, ...]
    peak: int
    at: str  # the equation at the peak: its results, its operator, the user's line

    @staticmethod
    def of(trace: Trace, steps: Sequence[tuple[int, int]]) -> Timeline:
        during = tuple(d for d, _ in steps)
        peak = max(during, default=0)
        at = _text(trace.equations[during.index(peak)]) if during else ""
        return Timeline(during, tuple(a for _, a in steps), peak, at)


@dataclass(frozen=True)
class Memory:
    """One generated program's memory."""

    program: str  # forward, backward, or inference
    equations: tuple[str, ...]
    predicted: Timeline
    measured: Timeline | None = None
    note: str = ""  # why nothing was measured


def _text(eqn: Equation) -> str:
    names = ", ".join(v.name for v in eqn.results())
    place = f" at {eqn.source}" if str(eqn.source) else ""
    return f"{names} = {operator_name(eqn.op, eqn.args, eqn.kwargs)}{place}"


def memory(compilation: Compilation, measure: bool) -> tuple[Memory, ...]:
    """The memory of every program of a compilation, in the order in which they run."""
    memories = []
    known: dict[str, object] = {}  # the forward's values that the backward takes
    for program in compilation.account.programs:
        trace = program.trace
        owned = _owned(compilation) if program.boxed else []
        predicted = Timeline.of(trace, live_bytes(trace, owned))
        measured, note = None, "not measured; ask for it with explain(fast, measure=True)"
        if measure:
            try:
                measured, note = _measure(trace, known, owned), ""
            except Exception as error:  # made-up inputs may be none that the program accepts
                note = f"not measured: {type(error).__name__}: {error}".splitlines()[0]
        memories.append(Memory(program.name, tuple(map(_text, trace.equations)), predicted, measured, note))
    return tuple(memories)


def _owned(compilation: Compilation) -> list[Value]:
    """What the backward takes that the forward made for it alone."""
    forward, backward = (program.trace for program in compilation.account.programs)
    return handed_over(forward, backward, compilation.account.results)


def _measure(trace: Trace, known: dict[str, object], owned: list[Value]) -> Timeline:
    if any(_communicates(eqn) for eqn in trace.equations):
        raise RuntimeError("the program talks to other processes")
    devices = {v.type.device for v in trace.values() if isinstance(v.type, TensorType)}
    cuda = next((d for d in devices if d.type == "cuda"), None)
    with torch.no_grad(), torch.random.fork_rng(devices=[cuda] if cuda else []):
        args = [known.get(v.name, x) for v, x in zip(trace.inputs, example_inputs(trace), strict=True)]
        kept = {v.name: x for v, x in zip(trace.inputs, args, strict=True) if v not in owned}
        for v in owned:
            known.pop(v.name, None)
        owned_bytes = sum(v.tensor.nbytes() for v in owned)
        watch = _Cuda(cuda, owned_bytes) if cuda is not None else _Cpu(owned_bytes)
        with watch.watching():
            outputs = step(trace, args, around=watch.around, call=_bound, boxed=True)
        known.update(kept)
        known.update({v.name: x for v, x in zip(trace.outputs, outputs, strict=True) if isinstance(v, Value)})
    return Timeline.of(trace, watch.steps(len(trace.equations)))


def most_allocated(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that a call has of its own at once."""
    watch = _Cuda(device, 0) if device.type == "cuda" else _Cpu(0)
    with watch.watching(), watch.around(0):
        call()
    return watch.steps(1)[0][0]


def _bound(eqn: Equation, args: tuple, kwargs: dict) -> object:
    return bind(eqn.op)(*args, **kwargs)  # as the generated program calls it


def _communicates(eqn: Equation) -> bool:
    return getattr(eqn.op, "namespace", "") in COLLECTIVES


class _Cuda:
    """The caching allocator counts by itself."""

    def __init__(self, device: torch.device, owned_bytes: int) -> None:
        self.device, self.owned_bytes = device, owned_bytes
        self.during: dict[int, int] = {}
        self.after: dict[int, int] = {}

    def watching(self) -> AbstractContextManager:
        self.base = torch.cuda.memory_allocated(self.device) - self.owned_bytes
        return nullcontext()

    @contextmanager
    def around(self, index: int, eqn: Equation | None = None) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        most = torch.cuda.max_memory_allocated(self.device) - self.base
        self.during[index] = max(most, self.during.get(index, 0))
        self.after[index] = torch.cuda.memory_allocated(self.device) - self.base

    def steps(self, count: int) -> list[tuple[int, int]]:
        return [(self.during[i], self.after[i]) for i in range(count)]


class _Cpu:
    """The profiler notes every allocation; marks around the equations say whose it is."""

    def __init__(self, owned_bytes: int) -> None:
        self.owned_bytes = owned_bytes

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _muted():
            self.profile.start()
        try:
            yield
        finally:
            with _muted():
                self.profile.stop()

    def around(self, index: int, eqn: Equation | None = None) -> AbstractContextManager:
        return record_function(f"{_MARK}{index}")

    def steps(self, count: int) -> list[tuple[int, int]]:
        results = self.profile.profiler.kineto_results  # type: ignore[union-attr]
        marks: list[tuple[int, int, int]] = []
        changes: list[tuple[int, int]] = []
        for event in results.events():
            if event.name().startswith(_MARK):
                start = event.start_ns()
                marks.append((start, start + event.duration_ns(), int(event.name()[len(_MARK) :])))
            elif event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
                changes.append((event.start_ns(), event.nbytes()))
        during, after = [0] * count, [0] * count
        now = self.owned_bytes
        pending = sorted(changes)
        for start, end, index in sorted(marks):
            pending, now = _until(pending, start, now)
            most = now
            while pending and pending[0][0] <= end:
                now += pending.pop(0)[1]
                most = max(most, now)
            during[index], after[index] = max(during[index], most), now
        return list(zip(during, after, strict=True))


@contextmanager
def _muted() -> Iterator[None]:
    """The profiler's library tells standard error, below Python, that it starts and stops."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _until(changes: list[tuple[int, int]], moment: int, now: int) -> tuple[list[tuple[int, int]], int]:
    """What was allocated before this moment counts as there already."""
    early = [n for t, n in changes if t < moment]
    return changes[len(early) :], now + sum(early)
