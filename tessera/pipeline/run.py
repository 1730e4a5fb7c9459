"""One captured graph on its way through a pipeline.

In: a captured program, options, and programs that a user put in place of stages. Out: the programs to run, how they
line up with their caller (`Ends`), and the account of what happened.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from types import MappingProxyType

from tessera.executors.base import in_order
from tessera.executors.dumped import dump_kernels
from tessera.frontends.captured import Captured
from tessera.ir.equation import Arg, Value
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ir.verify import verify
from tessera.passes.clean.known import Given
from tessera.passes.memory.offload import Halves
from tessera.pipeline.account import Account, Program
from tessera.pipeline.executable import Ends, finished
from tessera.pipeline.lists import PIPELINES, cleaned
from tessera.pipeline.options import Options
from tessera.pipeline.stage import BACKWARD, FORWARD, PROGRAM, Stage, expanded
from tessera.runtime.call import Layout
from tessera.runtime.plan import bridge_of, core_of, layout_of, without_linked
from tessera.transforms.halves import Split
from tessera.transforms.vjp import Joint
from tessera.util.config import config
from tessera.util.log import log
from tessera.util.units import counted

Edits = dict[str, Trace]  # by the title of a stage, the program to go on with


class Run:
    """The programs under way, by name, and what stages leave for one another."""

    joint: Joint  # cleaned, forward before backward
    split: Split
    halves: Halves  # what is saved may wait on the host
    results: list[Arg]  # what forward gives its caller
    linked = True  # results may be asked for their gradients by each other
    backward: Collection[Value] = ()  # in a program of both halves, what backward computes
    ways: Mapping[str, str] = MappingProxyType({})  # on a mesh, of axes along which operands are exchanged, how

    def __init__(
        self, name: str, captured: Captured, options: Options, grad: bool, given: tuple[Given, ...], edits: Edits
    ) -> None:
        """`given`: values that are known when the program begins, because others computed them."""
        self.name, self.captured, self.options, self.given, self.edits = name, captured, options, given, edits
        self.executors = in_order(options.executors)
        self.account = Account(options.executors)
        self.traces: dict[str, Trace] = {}
        self.wrt: list[Value] = []
        # Gradients that nobody differentiates again read what forward saved; anything else is inference.
        self.kind = self.plain_kind = "derivative" if given else "inference"
        self.cleaning = cleaned()
        self.begin(grad)

    @property
    def run(self) -> Run:
        """Stages that need more than single attributes ask for the run."""
        return self

    def begin(self, grad: bool) -> None:
        """Differentiable if grad mode is on and an input requires grad."""
        core = core_of(self.keep("captured", self.captured.trace), self.captured)
        needs = zip(core.inputs, self.captured.requires_grad, strict=True)
        self.wrt = [v for v, wanted in needs if wanted and _floats(v)] if grad else []
        self.kind = "training" if self.wrt else self.plain_kind
        self.traces[PROGRAM] = self.account.core = core

    def pull(self, _: Trace) -> list[Value] | None:
        """The results that gradients are taken of; None: all."""
        return None

    def without_gradient(self) -> None:
        """Nothing to differentiate after all."""
        self.kind = self.plain_kind

    def completed(self, split: Split) -> Split:
        """Both halves, where backward reads more than its gradients need."""
        return split

    def backward_of(self, split: Split) -> Trace:
        return split.backward

    def go(self) -> None:
        """Every stage in turn. What a stage finds out may change the kind of the pipeline: what both have is done."""
        kind, done = self.kind, []
        pending = expanded(PIPELINES[kind], self.executors)
        while pending:
            done.append(stage := pending.pop(0))
            self.apply(stage)
            if self.kind != kind:
                kind = self.kind
                pending = [s for s in expanded(PIPELINES[kind], self.executors) if s not in done]

    def apply(self, stage: Stage) -> None:
        before = self.traces[stage.over]
        if stage.when is not None and not stage.when(self, before):
            return
        after = stage.apply(before, **{need: getattr(self, need) for need in stage.needs})
        if not (stage.quiet and _same(before, after)):
            after = self.keep(stage.title, after)
        self.traces[stage.over if stage.gives is None else stage.gives] = after
        if stage.title in self.cleaning:
            self.account.core = after

    def keep(self, title: str, trace: Trace) -> Trace:
        """Takes a stage down; gives the program to go on with."""
        trace = self.edits.get(title, trace)
        stages = self.account.stages
        stages.append((title, trace))
        if config.verify:
            verify(trace)
        if config.dump:
            folder = os.path.join(config.dump, self.name)
            os.makedirs(folder, mode=0o700, exist_ok=True)
            start = os.path.join(folder, f"{len(stages):02d}_{title.replace(' ', '_')}")
            trace.save(f"{start}.py")
            if title.endswith("claim"):
                dump_kernels(trace, start)
        log(2, f"{self.name}: {title}: {counted(len(trace.equations), 'equation')}")
        log(3, trace)
        return trace

    def ends(self) -> Ends:
        """How the programs line up with their caller."""
        core = self.account.core
        assert core is not None
        written = tuple(i for i, v in enumerate(core.inputs) if v in core.mutations)
        if self.kind == self.plain_kind:
            (functional,) = self.account.to_claim
            outputs = list(functional.outputs)
            return Ends(layout_of(self.captured, functional, outputs, {}), None, written)  # type: ignore[arg-type]
        linked, edited, layout = self.linked and not self.given, bool(self.edits), self.layout()
        plan = bridge_of(
            self.captured, self.joint, self.split, self.results, self.given, linked, edited, layout.write_back
        )
        return Ends(without_linked(layout, plan), plan, written)

    def layout(self) -> Layout:
        trace = self.joint.trace
        outputs = trace.outputs[: len(trace.outputs) - len(self.joint.wrt)]
        write_back = {t: trace.mutations[t] for t in self.split.returned}
        return layout_of(self.captured, trace.with_(outputs=outputs), self.results, write_back)  # type: ignore[arg-type]

    def programs(self) -> list[Program]:
        """Each final program as generated Python."""
        if self.kind == self.plain_kind:
            return [self.program("inference", self.traces[PROGRAM])]
        return [
            self.program(FORWARD, self.traces[FORWARD]),
            self.program(BACKWARD, self.traces[BACKWARD], boxed=True),
        ]

    def program(self, name: str, final: Trace, boxed: bool = False) -> Program:
        return Program(name, final, finished(final, boxed), boxed)


def _floats(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.is_differentiable


def _same(before: Trace, after: Trace) -> bool:
    return after is before or (
        after.equations == before.equations and after.outputs == before.outputs and after.inputs == before.inputs
    )
