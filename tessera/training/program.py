"""The programs of a training step, from a captured loss to one callable.

    captured loss -> clean -> vjp -> clean -> remat -> forward | backward + clipping + update -> claim each -> join

Forward and backward are claimed apart, so that kernels are those of an ordinary training graph and what backward
computes again is not fused into the forward; then both are one program, with one order and one plan of memory, in
which a gradient dies where its parameter is updated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from tessera.frontends.captured import Captured
from tessera.ir.builder import Builder, aten
from tessera.ir.equation import Equation, Special, Value, map_values
from tessera.ir.mode import mode_of
from tessera.ir.serial import Writer
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.optim.updates import Extra, Plan, append_updates
from tessera.passes.clean.dce import dce
from tessera.passes.memory.offload import Halves
from tessera.passes.patterns.linear_loss import linear_loss
from tessera.pipeline.compilation import (
    Compilation,
    Options,
    Program,
    clean_joint,
    finished,
    recompute_budget,
)
from tessera.runtime.call import Layout, build_call
from tessera.runtime.plan import core_of, layout_of
from tessera.store.key import Key
from tessera.store.program import Stored, load_note, read_layout, save_note, write_layout
from tessera.transforms.remat import Split, remat
from tessera.transforms.vjp import Joint, vjp
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


class StepProgram(Compilation):
    """What both kinds of programs have: the plan they carry out, their further inputs, the inputs they write."""

    plan: Plan
    extras: tuple[Extra, ...]
    written: tuple[int, ...]

    def ready(self, final: Trace) -> None:
        self.programs.append(Program("step", final, finished(final)))
        self.finish(self.programs)

    def finish(self, programs: list[Program]) -> None:
        self.call = self.replayed(programs[0].run, programs[0].trace, self.written)

    def join(self, *runs: Callable) -> Callable:
        (run,) = runs
        return run


class StepCompilation(StepProgram):
    """A loss on its way to a step. `plan(grads)` is asked once it is known which parameters have gradients."""

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

    # --- kept on disk: first which inputs have gradients, then, for the plan that follows from them, the program ---

    def identity(self) -> dict[str, object]:
        return {**super().identity(), "loss": self.loss.name, "wrt": self.wrt, "scale": self.scale}

    def load(self, key: Key) -> bool:
        given = load_note(key)
        if given is None:
            return False
        ask, decided = self.plan_of, self.plan_of(given)
        more = plan_data(*decided)
        if more is None:
            return False
        self.plan_of = lambda _: decided  # the optimizer goes on; who builds the stages later wants this plan
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
        extras = [[e.kind, e.member, e.name, writer.arg(e.dtype), writer.arg(e.device)] for e in self.extras]
        layout = write_layout(self.layout, writer)
        return {"layout": layout, "extras": extras, "written": self.written, "results": self.results, "kept": self.kept}

    def restore(self, stored: Stored) -> None:
        details, reader = stored.details, stored.reader
        self.extras = tuple(
            Extra(kind, i, name, reader.arg(t), reader.arg(d)) for kind, i, name, t, d in details["extras"]
        )  # type: ignore[arg-type]
        self.hand_out = _outputs(read_layout(details["layout"], reader))
        self.written, self.results, self.kept = tuple(details["written"]), details["results"], details["kept"]
        self.cuda_graph = ""
        self.finish([Program(p.name, p.trace, finished(p.trace, p.boxed), p.boxed) for p in stored.parts])

    def build(self) -> None:
        start = time.perf_counter()
        self.reset()
        captured = self.keep("captured", self.captured.trace)
        core = core_of(captured, self.captured)
        place = core.outputs.index(captured.outputs[self.loss_at])
        core = self.clean(core, [core.inputs[i] for i in self.wrt])
        if self.fusers():  # as in every training graph: the loss's gradient is made beside the loss
            core = self.keep("linear_loss", dce(linear_loss(core)))
        loss = core.outputs[place]
        assert isinstance(loss, Value)
        joint = vjp(core, [core.inputs[i] for i in self.wrt], self.captured.mode, pull=[loss])
        if not joint.pulled:
            raise CaptureError("the loss depends on no parameter of the optimizer")
        if both := [v.name for v in joint.wrt if v in joint.trace.mutations]:
            raise CaptureError(f"the program writes the parameter {both[0]} itself")
        self.keep("vjp", joint.trace)
        joint = clean_joint(self, joint)
        split = remat(joint, self.options.recompute, recompute_budget(self.options))
        self.saved_bytes = split.saved_bytes
        self.saved = tuple(v.name for v in split.saved if v not in joint.trace.inputs)
        self._program(joint, split)
        self.seconds = time.perf_counter() - start

    def _program(self, joint: Joint, split: Split) -> None:
        count = len(split.forward.outputs) - len(split.saved)
        results = list(dict.fromkeys(split.forward.outputs[:count]))
        forward = dce(split.forward.with_(outputs=(*results, *split.saved)))
        grads = split.backward.outputs
        position = {i: k for k, i in enumerate(self.wrt)}
        given = [i for i in self.wrt if isinstance(grads[position[i]], Value)]
        self.with_grads = given
        self.plan, members = self.plan_of(given)
        self.members = members
        values = {i: self.captured.trace.inputs[i] for i in self.wrt}
        plan = replace(
            self.plan,
            members=tuple(
                m if i is None else replace(m, value=values[i]) for m, i in zip(self.plan.members, members, strict=True)
            ),
        )
        backward = _seeded(split.backward, joint, self.scale)
        backward = backward.with_(
            outputs=(), inputs=tuple(dict.fromkeys((*backward.inputs, *(m.value for m in plan.members if m.value))))
        )
        chosen = [None if i is None else grads[position[i]] for i in members]
        backward, self.extras = append_updates(backward, plan, chosen)  # type: ignore[arg-type]
        made = self.offload(Halves(forward, dce(backward), split.saved))
        forward, backward = self.keep("forward", made.forward), self.keep("backward", made.backward)
        # An edited half is another program over values of its own: they meet by position.
        links = dict(zip(made.saved, forward.outputs[len(results) :], strict=True))
        names = {a: links.get(b, b) for a, b in zip(backward.inputs, made.backward.inputs, strict=True)}
        backward = renamed(backward, {a: b for a, b in names.items() if a is not b})  # type: ignore[misc]
        self.kept = len(backward.outputs)
        outputs = joint.trace.outputs[: len(joint.trace.outputs) - len(joint.wrt)]
        write_back = {t: joint.trace.mutations[t] for t in split.returned}
        layout = layout_of(self.captured, joint.trace.with_(outputs=outputs), results, write_back)  # type: ignore[arg-type]
        self.layout = replace(layout, written=(), inside=())
        self.hand_out = _outputs(self.layout)
        halves = self.claimed(forward, "forward "), self.claimed(backward, "backward ")
        step = self.keep("step", joined(*halves, len(results), self.name))
        late = step.equations[len(step.equations) - len(halves[1].equations) :]
        final = self.final(step, "step ", {v for eqn in late for v in eqn.results()})
        self.results = len(results)
        inputs = {v: i for i, v in enumerate(final.inputs)}
        self.written = tuple(inputs[v] for v in step.mutations)
        self.ready(final)


class UpdateCompilation(StepProgram):
    """The optimizer's step alone, from gradients that are there already."""

    def __init__(self, name: str, plan: Plan, grads: list[TensorType], options: Options) -> None:
        self.plan, self.grads = plan, grads
        super().__init__(name, None, _never, options)  # type: ignore[arg-type]

    def key(self) -> None:
        """It is quickly made: nothing is kept on disk."""
        return None

    def build(self) -> None:
        start = time.perf_counter()
        self.reset()
        builder = Builder(self.name)
        given = [builder.input(f"{m.name}_grad", t) for m, t in zip(self.plan.members, self.grads, strict=True)]
        trace, self.extras = append_updates(builder.finish([]), self.plan, given)
        trace = self.keep("update", trace)
        self.written = tuple(i for i, v in enumerate(trace.inputs) if v in trace.mutations)
        final = self.final(self.claimed(trace))
        self.ready(final)
        self.seconds = time.perf_counter() - start


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


def _outputs(layout: Layout) -> Callable[[tuple, tuple], tuple]:
    """The caller's outputs, from what the program gave and the graph's inputs."""
    given: list[tuple] = [()]
    call = build_call(lambda *_: given[0], layout, _never, guarded=False)

    def hand_out(out: tuple, args: tuple) -> tuple:
        given[0] = out
        try:
            return call(*args)
        finally:
            given[0] = ()

    return hand_out


def _never(*_: object) -> object:
    raise AssertionError("a step's programs are not called through their compilation")


def _seeded(backward: Trace, joint: Joint, scale: float) -> Trace:
    """The backward of the loss alone: its cotangent is a number known now."""
    (seed,) = backward.inputs[len(backward.inputs) - len(joint.pulled) :]
    builder = Builder(backward.name, mode_of(backward))
    builder.reserve(list(backward.values()))
    with builder:
        made = aten.full(list(seed.shape), scale, dtype=seed.dtype, device=seed.tensor.device)
    first = builder.equations[-1].with_(outputs=(seed,))
    assert isinstance(made, Value)
    inputs = tuple(v for v in backward.inputs if v is not seed)
    return backward.with_(inputs=inputs, equations=(first, *backward.equations))


def renamed(trace: Trace, rename: dict[Value, Value]) -> Trace:
    """The same program over other inputs."""
    if not rename:
        return trace

    def look(v: Value) -> Value:
        return rename.get(v, v)

    return trace.with_(
        inputs=tuple(map(look, trace.inputs)),
        equations=tuple(e.substitute(rename) for e in trace.equations),
        outputs=map_values(trace.outputs, look),
        mutations={look(t): look(v) for t, v in trace.mutations.items()},
        symbols={s: (look(v), d) for s, (v, d) in trace.symbols.items()},
    )


def joined(forward: Trace, backward: Trace, results: int, name: str) -> Trace:
    """One program of two, the second reading what the first gives.

    What both define (backward computes it again) gets another name in the second.
    """
    taken = {v.name: v for v in forward.values()}
    builder = Builder(name, mode_of(forward))
    builder.reserve(list(forward.values()))
    builder.reserve(list(backward.values()))
    made = {v for eqn in backward.equations for v in eqn.results()}
    rename = {v: Value(builder.fresh(v.name), v.type) for v in made if v.name in taken}
    equations = []
    for eqn in backward.equations:
        eqn = eqn.substitute(rename)
        equations.append(eqn.with_(outputs=tuple(None if v is None else rename.get(v, v) for v in eqn.outputs)))
    there = set(forward.values())
    sizes = [v for v in backward.inputs if v not in there and v.name in forward.symbols]
    symbols = {**forward.symbols, **{v.name: (v, None) for v in sizes}}
    for symbol, (v, dim) in backward.symbols.items():
        symbols.setdefault(symbol, (rename.get(v, v), dim))
    return Trace(
        name,
        (*forward.inputs, *(v for v in backward.inputs if v not in there and v not in sizes)),
        (*(_size(forward, v) for v in sizes), *forward.equations, *equations),
        (*forward.outputs[:results], *map_values(backward.outputs, lambda v: rename.get(v, v))),  # type: ignore[misc]
        {**forward.mutations, **{t: rename.get(v, v) for t, v in backward.mutations.items()}},
        {**forward.constants, **backward.constants},
        symbols,
    )


SIZE = Special("size", lambda x, dim: x.shape[dim])


def _size(forward: Trace, v: Value) -> Equation:
    """A size of an input as a value of its own, which backward's regions take as an argument."""
    source, dim = forward.symbols[v.name]
    return Equation(SIZE, (source, dim), {}, (v,))
