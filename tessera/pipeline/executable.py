"""What a caller calls: compiled programs, joined as their caller wants them.

In: programs as generated Python, and `Ends`, which say how inputs, results and gradients line up. Out: `call`. Both can
come from the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tessera.executors.aten import bind
from tessera.ir.lifetimes import lifetimes
from tessera.ir.printer import compile_trace
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.passes.memory.addresses import addresses
from tessera.passes.memory.reinterpret import reinterpret
from tessera.pipeline.account import Program
from tessera.pipeline.options import Options
from tessera.runtime import transfer  # noqa: F401  (registers how copies to the host run on CUDA)
from tessera.runtime.autograd import Bridge, bridge, with_grad
from tessera.runtime.call import Layout, build_call
from tessera.runtime.capturable import device_of, why_not_captured
from tessera.runtime.contracts import checked_inputs, contracts
from tessera.runtime.cudagraph import Graphed
from tessera.runtime.double_backward import DoubleBackward
from tessera.runtime.plan import positions_read
from tessera.util.config import config


def finished(final: Trace, boxed: bool = False) -> Callable:
    """The last program as generated Python; boxed, its inputs die with their last reader too. With `verify` it compares
    whatever its equations give with what the trace says."""
    if not config.verify:
        final = reinterpret(addresses(final))
        return compile_trace(final, bind=bind, dead=lifetimes(final, inputs=boxed), boxed=boxed)
    dead = lifetimes(final, inputs=boxed)
    around, names = contracts(final)
    run = compile_trace(final, bind=bind, dead=dead, around=around, names_in_scope=names, boxed=boxed)
    return checked_inputs(final, run, boxed)


@dataclass(frozen=True)
class Ends:
    """How programs line up with their caller."""

    layout: Layout  # the caller's outputs, of what the programs give
    bridge: Bridge | None  # forward and backward, where there are two
    written: tuple[int, ...]  # inputs that the program writes


class Executable:
    """`call` is what runs. `edit` and profilers replace it, so whoever calls looks it up at each call."""

    def __init__(
        self,
        programs: list[Program],
        ends: Ends,
        eager: Callable,
        options: Options,
        derivative: Callable,
        enables_grad: bool = False,
    ) -> None:
        """`derivative` compiles the backward as a graph of its own, once somebody differentiates it."""
        self.ends, self.eager, self.derivative, self.enables_grad = ends, eager, derivative, enables_grad
        self.cuda_graph: object = ""  # what replays the program, or in words why nothing does
        self.reads = positions_read(programs[0].trace)
        runs = [program.run for program in programs]
        if ends.bridge is None:
            runs = [self.replayed(runs[0], programs[0].trace, options)]
        elif options.cuda_graph != "off":
            self.cuda_graph = "no CUDA graph: gradients flow through it; tessera.train_step replays whole steps"
        self.call = self.join(*runs)

    def join(self, *runs: Callable) -> Callable:
        """Programs as one call. Kept apart from them, so that a profiler can join others that do the same."""
        layout, plan = self.ends.layout, self.ends.bridge
        core = runs[0]
        if plan is not None:
            again = DoubleBackward(plan, self.derivative, frozenset(self.ends.written))
            core = bridge(runs[0], runs[1], plan, again, again.between)
        if self.enables_grad:  # views that it gives back have histories too
            return with_grad(build_call(core, layout, torch.no_grad()(self.eager), guarded=plan is None))
        return build_call(core, layout, self.eager, guarded=plan is None)

    def replayed(self, run: Callable, trace: Trace, options: Options) -> Callable:
        """A program as one that is replayed as a CUDA graph, where that is wanted and can be."""
        if options.cuda_graph == "off":
            return run
        reason = why_not_captured(trace)
        self.cuda_graph = f"no CUDA graph: {reason}"
        device = device_of(trace)
        if reason or device is None:
            return run
        fixed = [isinstance(v.type, TensorType) and not v.type.is_symbolic for v in trace.inputs]
        varying = [i for i, known in enumerate(fixed) if not known]
        always = options.cuda_graph == "on"
        self.cuda_graph = graphed = Graphed(run, self.ends.written, device, varying=varying, always=always)
        return graphed
