"""The programs of a training step, from a captured loss to one callable.

Its pipelines are "step" and "update". Forward and backward are claimed apart, so that kernels are those of an ordinary
training graph and what backward recomputes is not fused into the forward; then both are one program, with one order and
one plan of memory, in which a gradient dies where its parameter is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from tessera.frontends.captured import Captured
from tessera.ir.builder import Builder, aten
from tessera.ir.equation import Value, map_values
from tessera.ir.mode import mode_of
from tessera.ir.serial import Reader, Writer
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.optim.updates import Extra, Plan, append_updates
from tessera.pipeline.account import Account, Program
from tessera.pipeline.compilation import Compilation
from tessera.pipeline.executable import Ends, Executable
from tessera.pipeline.lists import CLEAN, DIFFERENTIATE, PIPELINES, SPLIT, claiming, finishing
from tessera.pipeline.options import Options
from tessera.pipeline.run import Edits, Run
from tessera.pipeline.stage import BACKWARD, FORWARD, PROGRAM, STEP, Stage
from tessera.runtime.call import Layout, build_call
from tessera.runtime.plan import core_of
from tessera.store.key import Key
from tessera.store.layout import read_layout, write_layout
from tessera.store.program import Stored, load_note, save_note
from tessera.transforms.halves import Split
from tessera.transforms.join import joined, over, renamed
from tessera.transforms.vjp import Joint
from tessera.util.errors import CaptureError, Unserial


def _mark(loss: torch.Tensor) -> torch.Tensor:
    return loss.clone()


# Stands in a captured graph where the loss is: outputs of a graph come in an order of Dynamo's own.
_LIBRARY = torch.library.Library("tessera", "FRAGMENT")
_LIBRARY.define("loss(Tensor loss) -> Tensor")
_LIBRARY.impl("loss", _mark, "CompositeExplicitAutograd")
LOSS = torch.ops.tessera.loss.default


def without_mark(captured: Captured) -> tuple[Captured, Value]:
    """The captured program and its loss, with the mark taken out."""
    trace = captured.trace
    marks = [eqn for eqn in trace.equations if eqn.op is LOSS]
    if len(marks) != 1:
        raise CaptureError(f"expected one loss in the captured graph, found {len(marks)}")
    (loss,) = marks[0].inputs()
    if not loss.tensor.is_float or loss.tensor.numel() != 1:
        raise CaptureError(f"expected the loss to be one floating-point number, got {loss.type}")
    rename = {marks[0].out: loss}
    equations = tuple(e.substitute(rename) for e in trace.equations if e is not marks[0])
    outputs = map_values(trace.outputs, lambda v: rename.get(v, v))
    return replace(captured, trace=trace.with_(equations=equations, outputs=outputs)), loss


class StepRun(Run):
    """A loss on its way to a step. `plan(grads)` is asked once it is known which parameters have gradients."""

    def __init__(self, compilation: StepCompilation, captured: Captured, edits: Edits) -> None:
        self.of = compilation
        super().__init__(compilation.name, captured, compilation.options, True, (), edits)

    def begin(self, _: bool) -> None:
        captured = self.keep("captured", self.captured.trace)
        core = self.traces[PROGRAM] = self.account.core = core_of(captured, self.captured)
        self.loss_at = core.outputs.index(captured.outputs[self.of.loss_at])
        self.wrt = [core.inputs[i] for i in self.of.wrt]
        self.kind = "step"

    def pull(self, core: Trace) -> list[Value]:
        if both := [v.name for v in self.wrt if v in core.mutations]:
            raise CaptureError(f"the program writes the parameter {both[0]} itself")
        loss = core.outputs[self.loss_at]
        assert isinstance(loss, Value)
        return [loss]

    def without_gradient(self) -> None:
        raise CaptureError("the loss depends on no parameter of the optimizer")

    def backward_of(self, split: Split) -> Trace:
        """Backward with clipping and the update at its end."""
        if self.joint.histories:
            name = self.joint.histories[0].name
            raise CaptureError(
                f"the program writes {name} with what depends on parameters: the next step leads through it"
            )
        of, grads = self.of, split.backward.outputs
        position = {i: k for k, i in enumerate(of.wrt)}
        self.with_grads = [i for i in of.wrt if isinstance(grads[position[i]], Value)]
        self.plan, self.members = of.plan_of(self.with_grads)
        inputs = self.captured.trace.inputs
        placed = [
            member if i is None else replace(member, value=inputs[i])
            for member, i in zip(self.plan.members, self.members, strict=True)
        ]
        backward = seeded(split.backward, self.joint, of.scale)
        values = [member.value for member in placed if member.value]
        backward = backward.with_(outputs=(), inputs=tuple(dict.fromkeys((*backward.inputs, *values))))
        chosen = [None if i is None else grads[position[i]] for i in self.members]
        backward, self.extras = append_updates(backward, replace(self.plan, members=tuple(placed)), chosen)  # type: ignore[arg-type]
        return backward

    def step(self, forward: Trace) -> Trace:
        """Both halves as one program. An edited half has values of its own: they meet by position."""
        backward, count = self.traces[BACKWARD], len(self.results)
        forward = over(forward, self.halves.forward.inputs)
        links = dict(zip(self.halves.saved, forward.outputs[count:], strict=True))
        names = {a: links.get(b, b) for a, b in zip(backward.inputs, self.halves.backward.inputs, strict=True)}
        backward = renamed(backward, {a: b for a, b in names.items() if a is not b})  # type: ignore[misc]
        step = joined(forward, backward, count, self.name)
        late = step.equations[len(step.equations) - len(backward.equations) :]
        self.backward = {v for eqn in late for v in eqn.results()}
        self.written = tuple(step.mutations)
        return step

    def ends(self) -> Ends:
        inputs = {v: i for i, v in enumerate(self.traces[STEP].inputs)}
        layout = replace(self.layout(), written=(), counted=())
        return Ends(layout, None, tuple(inputs[v] for v in self.written))

    def programs(self) -> list[Program]:
        return [self.program(STEP, self.traces[STEP])]


class UpdateRun(Run):
    """The optimizer's step alone, from gradients that are there already."""

    def __init__(self, name: str, plan: Plan, grads: list[TensorType], options: Options) -> None:
        self.plan, self.grads = plan, grads
        super().__init__(name, None, options, False, (), {})  # type: ignore[arg-type]

    def begin(self, _: bool) -> None:
        builder = Builder(self.name)
        grads = [builder.input(f"{m.name}_grad", t) for m, t in zip(self.plan.members, self.grads, strict=True)]
        trace, self.extras = append_updates(builder.finish([]), self.plan, grads)
        trace = self.traces[PROGRAM] = self.keep("update", trace)
        self.written = tuple(i for i, v in enumerate(trace.inputs) if v in trace.mutations)
        self.kind = "update"

    def ends(self) -> Ends:
        return Ends(Layout(()), None, self.written)

    def programs(self) -> list[Program]:
        return [self.program(STEP, self.traces[PROGRAM])]


def _step(forward: Trace, run: StepRun) -> Trace:
    return run.step(forward)


PIPELINES["step"] = [
    *CLEAN, *DIFFERENTIATE, *SPLIT, *claiming(FORWARD), *claiming(BACKWARD),
    Stage("step", _step, "after claiming: what backward recomputes is not fused into the forward", FORWARD,
          gives=STEP, needs=("run",)),
    *finishing(STEP),
]  # fmt: skip
PIPELINES["update"] = [*claiming(PROGRAM), *finishing(PROGRAM)]


class StepExecutable(Executable):
    """A step's program: it is given more than the graph's inputs, and writes in place."""

    def __init__(self, programs: list[Program], ends: Ends, options: Options, extras: tuple[Extra, ...]) -> None:
        super().__init__(programs, ends, _never, options, _never)
        self.extras = extras  # the inputs after the graph's own

    def join(self, *runs: Callable) -> Callable:
        (run,) = runs
        return run


class StepProgram(Compilation):
    """What both kinds of programs have: the plan they carry out."""

    shortens = False  # updates of all layers share launches
    plan: Plan
    executable: StepExecutable


class StepCompilation(StepProgram):
    kinds = ("step",)
    results: int  # how many of the program's outputs are the caller's; then come gradients
    members: list[int | None]
    with_grads: list[int]
    hand_out: Callable[[tuple, tuple], tuple]

    def __init__(
        self,
        name: str,
        captured: Captured,
        loss: Value,
        options: Options,
        wrt: list[int],
        plan: Callable[[list[int]], tuple[Plan, list[int | None]]],
        scale: float,
    ) -> None:
        self.loss, self.wrt, self.plan_of, self.scale = loss, wrt, plan, scale
        self.loss_at = captured.trace.outputs.index(loss)  # an edited program has values of its own
        super().__init__(name, captured, _never, options)

    def through(self, captured: Captured, edits: Edits) -> tuple[StepExecutable, Account]:
        run = StepRun(self, captured, edits)
        run.go()
        programs, ends = run.programs(), run.ends()
        run.account.programs = programs
        executable = StepExecutable(programs, ends, self.options, run.extras)
        self.plan, self.members, self.with_grads = run.plan, run.members, run.with_grads
        self.results, self.hand_out = len(run.results), _outputs(ends.layout)
        return executable, run.account

    # --- kept on disk: first which inputs have gradients, then, for the plan that follows from them, the program ---

    def identity(self) -> dict[str, object]:
        return {**super().identity(), "loss": self.loss.name, "wrt": self.wrt, "scale": self.scale}

    def load(self, key: Key) -> bool:
        positions = load_note(key)
        if positions is None:
            return False
        ask, decided = self.plan_of, self.plan_of(positions)
        more = plan_data(*decided)
        if more is None:
            return False
        self.plan_of = lambda _: decided  # the optimizer goes on; who asks for the stages later wants this plan
        self.plan = decided[0]
        if super().load(key.with_more(more)):
            return True
        self.plan_of = ask
        return False

    def store(self, key: Key) -> None:
        more = plan_data(self.plan, self.members)
        if more is None:
            raise Unserial(f"the optimizer {self.plan.rule.name} is not one of Tessera's own rules")
        super().store(key.with_more(more))
        save_note(key, self.with_grads)

    def details(self, writer: Writer) -> dict:
        executable = self.executable
        extras = write_extras(executable.extras, writer)
        layout = write_layout(executable.ends.layout, writer)
        return {"layout": layout, "extras": extras, "written": executable.ends.written, "results": self.results}

    def restored(self, programs: list[Program], stored: Stored) -> StepExecutable:
        details, reader = stored.details, stored.reader
        extras = read_extras(details["extras"], reader)
        ends = Ends(read_layout(details["layout"], reader), None, tuple(details["written"]))
        self.results, self.hand_out = details["results"], _outputs(ends.layout)
        return StepExecutable(programs, ends, self.options, extras)


class UpdateCompilation(StepProgram):
    """The optimizer's step alone."""

    kinds = ("update",)

    def __init__(self, name: str, plan: Plan, grads: list[TensorType], options: Options) -> None:
        self.plan, self.grads = plan, grads
        super().__init__(name, None, _never, options)  # type: ignore[arg-type]

    def key(self) -> None:
        """It is quickly made: nothing is kept on disk."""
        return None

    def through(self, captured: Captured, edits: Edits) -> tuple[StepExecutable, Account]:
        run = UpdateRun(self.name, self.plan, self.grads, self.options)
        run.go()
        run.account.programs = run.programs()
        return StepExecutable(run.account.programs, run.ends(), self.options, run.extras), run.account


def plan_data(plan: Plan, members: list[int | None]) -> dict[str, object] | None:
    """A plan as data: whatever of it decides the equations. None where a rule is not Tessera's own."""
    rule = plan.rule
    if not all(fn.__module__.startswith("tessera.optim.") for fn in (rule.form, rule.state, rule.numbers, rule.update)):
        return None
    writer = Writer()

    def types(many: Iterable[TensorType | None]) -> list[int]:
        return [-1 if t is None else writer.type(t) for t in many]

    listed = [[m.name, m.family, types((m.type, m.total)), types(m.state)] for m in plan.members]
    families = [[f.group, repr(f.form), f.names] for f in plan.families]
    settings = [rule.name, plan.clips, plan.updates, plan.keeps]
    return {"members": listed, "inputs": members, "families": families, "settings": settings, **writer.tables()}


def write_extras(extras: Iterable[Extra], writer: Writer) -> list:
    return [[e.kind, e.member, e.name, writer.arg(e.dtype), writer.arg(e.device)] for e in extras]


def read_extras(data: list, reader: Reader) -> tuple[Extra, ...]:
    return tuple(Extra(kind, i, name, reader.arg(t), reader.arg(d)) for kind, i, name, t, d in data)  # type: ignore[arg-type]


def _outputs(layout: Layout) -> Callable[[tuple, tuple], tuple]:
    """The caller's outputs, from what the program gave and the graph's inputs."""
    results: list[tuple] = [()]
    call = build_call(lambda *_: results[0], layout, _never, guarded=False)

    def hand_out(out: tuple, args: tuple) -> tuple:
        results[0] = out
        try:
            return call(*args)
        finally:
            results[0] = ()

    return hand_out


def _never(*_: object) -> object:
    raise AssertionError("a step's programs are not called through their compilation")


def seeded(backward: Trace, joint: Joint, scale: float) -> Trace:
    """The backward of the loss alone: its cotangent is a number known now."""
    (seed,) = backward.inputs[len(backward.inputs) - len(joint.pulled) :]
    builder = Builder(backward.name, mode_of(backward))
    builder.reserve(list(backward.values()))
    with builder:
        cotangent = aten.full(list(seed.shape), scale, dtype=seed.dtype, device=seed.tensor.device)
    first = builder.equations[-1].with_(outputs=(seed,))
    assert isinstance(cotangent, Value)
    inputs = tuple(v for v in backward.inputs if v is not seed)
    return backward.with_(inputs=inputs, equations=(first, *backward.equations))
