"""Each pipeline as a visible list of named stages, and the function that runs a captured graph through one.

    captured trace -> clean -> (vjp -> clean -> remat) -> final -> claim -> generated Python

Every stage's program is kept in a `Compilation`, named, so that it can be printed, diffed, saved and edited.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tessera.executors.aten import bind
from tessera.executors.claim import Claim, claim
from tessera.frontends.captured import Captured
from tessera.ir.equation import Value, values_in
from tessera.ir.printer import compile_trace
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ir.verify import verify
from tessera.passes.canonicalise import canonicalise
from tessera.passes.cse import cse
from tessera.passes.dce import dce
from tessera.passes.fold import fold
from tessera.passes.reinplace import reinplace
from tessera.passes.schedule import lifetimes, schedule
from tessera.runtime.autograd import Bridge, bridge
from tessera.runtime.call import Layout, build_call
from tessera.transforms.remat import Split, remat
from tessera.transforms.vjp import Joint, vjp
from tessera.util.config import config, parse_bytes

Pass = Callable[[Trace], Trace]

# Local rewrites first: they expose equal equations to cse; dce last sweeps what both left.
CLEAN: list[tuple[str, Pass]] = [("canonicalise", canonicalise), ("fold", fold), ("cse", cse), ("dce", dce)]
# After differentiation: PyTorch's formulas bring views and detaches of their own.
CLEAN_JOINT: list[tuple[str, Pass]] = [("canonicalise", canonicalise), ("cse", cse)]
# Order matters: reinplace reads the final order of equations.
FINAL: list[tuple[str, Pass]] = [("schedule", schedule), ("reinplace", reinplace)]


@dataclass(frozen=True)
class Options:
    executors: tuple[str, ...] = ()
    recompute: str = "auto"
    memory_budget: int | None = None
    edits: dict[str, Trace] = field(default_factory=dict)  # stage -> the program to use in its place

    @staticmethod
    def of(executors: list[str] | tuple[str, ...] | None, recompute: str | None, memory_budget: str | int | None) -> Options:
        names = tuple(executors) if executors is not None else tuple(filter(None, config.executors.split(",")))
        budget = memory_budget if memory_budget is not None else config.memory_budget or None
        return Options(names, recompute or config.recompute, None if budget is None else parse_bytes(budget))


@dataclass
class Compilation:
    """All that happened to one graph."""

    name: str
    stages: list[tuple[str, Trace]] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    saved_bytes: int = 0
    saved: tuple[str, ...] = ()
    seconds: float = 0.0

    def stage(self, name: str) -> Trace:
        for known, trace in self.stages:
            if known == name:
                return trace
        raise KeyError(f"no stage {name!r}; the stages are {', '.join(n for n, _ in self.stages)}")


class Pipeline:
    """Runs one captured graph to a callable, keeping every stage."""

    def __init__(self, name: str, options: Options) -> None:
        self.options = options
        self.compilation = Compilation(name)

    def keep(self, stage: str, trace: Trace) -> Trace:
        trace = self.options.edits.get(stage, trace)
        self.compilation.stages.append((stage, trace))
        if config.verify:
            verify(trace)
        if config.dump:
            folder = os.path.join(config.dump, self.compilation.name)
            os.makedirs(folder, mode=0o700, exist_ok=True)
            trace.save(os.path.join(folder, f"{len(self.compilation.stages):02d}_{stage.replace(' ', '_')}.py"))
        return trace

    def run(self, trace: Trace, passes: list[tuple[str, Pass]], prefix: str = "") -> Trace:
        for name, step in passes:
            trace = self.keep(f"{prefix}{name}", step(trace))
        return trace

    def generate(self, trace: Trace, prefix: str) -> Callable:
        """Final passes, executors, Python."""
        trace = self.run(trace, FINAL, prefix)
        claimed, report = claim(trace, self.options.executors)
        self.compilation.claims += report
        claimed = self.keep(f"{prefix}claim", claimed)
        return compile_trace(claimed, bind=bind, dead=lifetimes(claimed))


def compile_captured(
    captured: Captured, eager: Callable, name: str, options: Options
) -> tuple[Callable, Compilation]:
    """A callable for a captured graph: differentiable if grad mode is on and an input requires grad."""
    start = time.perf_counter()
    pipeline = Pipeline(name, options)
    trace = pipeline.keep("captured", captured.trace)
    core = _core(trace, captured)
    core = pipeline.run(core, CLEAN)
    wrt = [v for v, wanted in zip(core.inputs, captured.requires_grad, strict=True) if wanted and _floats(v)]
    if torch.is_grad_enabled() and wrt:
        joint = vjp(core, wrt, captured.mode)
        if joint.pulled:
            call = _training(pipeline, captured, joint, eager)
            pipeline.compilation.seconds = time.perf_counter() - start
            return call, pipeline.compilation
    call = _inference(pipeline, captured, core, eager)
    pipeline.compilation.seconds = time.perf_counter() - start
    return call, pipeline.compilation


def _core(trace: Trace, captured: Captured) -> Trace:
    """The trace without outputs that are made from the inputs outside, each other output once."""
    outputs = [o for i, o in enumerate(trace.outputs) if i not in captured.aliased and isinstance(o, Value)]
    return trace.with_(outputs=tuple(dict.fromkeys(outputs)))


def _layout(captured: Captured, core: Trace, results: list[Value], write_back: dict[Value, Value]) -> Layout:
    """`results` are what the core gives, in order; names link them to the caller's outputs."""
    position = {v.name: i for i, v in enumerate(results)}
    core_outputs = iter(core.outputs)
    renamed: dict[Value, int] = {}
    parts: list[object] = []
    for i, out in enumerate(captured.trace.outputs):
        if i in captured.aliased:
            parts.append(captured.aliased[i])
        elif isinstance(out, Value):
            if out not in renamed:
                renamed[out] = position[next(core_outputs).name]  # type: ignore[union-attr]
            parts.append(renamed[out])
        else:
            parts.append(("constant", out))
    inputs = {v: i for i, v in enumerate(captured.trace.inputs)}
    written = tuple(inputs[v] for v in captured.trace.mutations)
    outside = tuple((inputs[t], position[v.name]) for t, v in write_back.items())
    inside = tuple(i for i in written if i not in {source for source, _ in outside})
    return Layout(tuple(parts), outside, written, inside)


def _inference(pipeline: Pipeline, captured: Captured, core: Trace, eager: Callable) -> Callable:
    fn = pipeline.generate(core, "")
    layout = _layout(captured, core, list(core.outputs), {})  # type: ignore[arg-type]
    return build_call(fn, layout, eager, guarded=True)


def _training(pipeline: Pipeline, captured: Captured, joint: Joint, eager: Callable) -> Callable:
    pipeline.keep("vjp", joint.trace)
    joint = _clean_joint(pipeline, joint)
    options = pipeline.options
    split = remat(joint, options.recompute, options.memory_budget)
    pipeline.compilation.saved_bytes = split.saved_bytes
    pipeline.compilation.saved = tuple(v.name for v in split.saved)
    forward = pipeline.keep("forward", dce(split.forward))
    backward = pipeline.keep("backward", dce(split.backward))
    count = len(split.forward.outputs) - len(split.saved)
    caller = list(split.forward.outputs[:count])
    unique = list(dict.fromkeys(caller))
    forward = forward.with_(outputs=(*unique, *split.saved))
    plan = _bridge_plan(captured, joint, split, unique)
    differentiable = bridge(pipeline.generate(forward, "forward "), pipeline.generate(backward, "backward "), plan)
    outputs = joint.trace.outputs[: len(joint.trace.outputs) - len(joint.wrt)]
    core = joint.trace.with_(outputs=outputs)
    write_back = {t: joint.trace.mutations[t] for t in split.returned}
    return build_call(differentiable, _layout(captured, core, unique, write_back), eager, guarded=False)  # type: ignore[arg-type]


def _clean_joint(pipeline: Pipeline, joint: Joint) -> Joint:
    """Clean the joint program without moving equations across the line between forward and backward."""
    boundary = set(joint.trace.equations[: joint.split])
    names = {v.name for e in boundary for v in e.results()}
    keep = joint.trace.with_(outputs=(*joint.trace.outputs, *joint.pulled))
    trace = pipeline.run(keep, CLEAN_JOINT, "joint ")
    pulled = trace.outputs[len(joint.trace.outputs) :]
    trace = trace.with_(outputs=trace.outputs[: len(joint.trace.outputs)])
    split = sum(all(v.name in names for v in e.results()) for e in trace.equations)
    early = [e for e in trace.equations if all(v.name in names for v in e.results())]
    late = [e for e in trace.equations if not all(v.name in names for v in e.results())]
    return Joint(trace.with_(equations=(*early, *late)), joint.wrt, tuple(pulled), split)  # type: ignore[arg-type]


def _bridge_plan(captured: Captured, joint: Joint, split: Split, results: list[object]) -> Bridge:
    position = {v: i for i, v in enumerate(results)}
    pulled = tuple(position[v] for v in joint.pulled)
    passive = tuple(i for i, v in enumerate(results) if i not in pulled and isinstance(v, Value))
    inputs = {v: i for i, v in enumerate(joint.trace.inputs)}
    tensors = tuple(i for i, v in enumerate(split.saved) if isinstance(v.type, TensorType))
    numbers = tuple(i for i, v in enumerate(split.saved) if not isinstance(v.type, TensorType))
    return Bridge(
        len(results),
        passive,
        pulled,
        tuple(inputs[v] for v in joint.wrt),
        len(captured.trace.inputs),
        tensors,
        numbers,
    )


def _floats(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.is_differentiable


__all__ = ["CLEAN", "CLEAN_JOINT", "FINAL", "Compilation", "Options", "compile_captured", "values_in"]
