"""Checks one compiled graph on given inputs, and finds what made it wrong.

In: a `Compilation` and the inputs of one call. Out: comparisons of its results, written inputs and gradients with a
float64 reference, and, where one is wrong, the `Fault`: the pass, rule or executor by name, and the first equation
whose error its dtype does not explain. Every stage of a compilation is a program that runs; the guilty one is found by
bisection between the captured program, which is right, and the generated one, which is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from tessera.executors.aten import bind
from tessera.inspection.compare import Comparison, compare
from tessera.inspection.explain import line_of
from tessera.inspection.precise import differentiably, gradients, precisely, widen
from tessera.inspection.rules import WrongRule, is_users, wrong_rules
from tessera.inspection.step import Call, plain, step, values_of
from tessera.ir import interp
from tessera.ir.equation import Equation, Special, Value, symbols_in
from tessera.ir.printer import equation_lines, operator_name
from tessera.ir.trace import Trace
from tessera.ir.types import size_hint
from tessera.ops.custom import AUTOGRAD_FUNCTION, CUSTOM_VJP, is_float
from tessera.pipeline.compilation import Compilation
from tessera.runtime.plan import core_of

Values = dict[str, torch.Tensor]
Results = dict[str, object]
SEED = 1234


@dataclass(frozen=True)
class Fault:
    """What is wrong, by name."""

    graph: str
    stage: str  # the stage whose program is the first wrong one
    guilty: str  # in words: "pass 'cse'", "vjp rule of aten.sin", "executor 'tile'", …
    operator: str = ""
    equation: str = ""
    line: str = ""  # the user's
    rule: str = ""  # where a guilty rule stands
    detail: str = ""

    def __str__(self) -> str:
        parts = [f"{self.guilty} is wrong in {self.graph}, stage {self.stage!r}"]
        if self.equation:
            parts.append(f"  first wrong equation: {self.equation}" + (f"  at {self.line}" if self.line else ""))
        elif self.line:
            parts.append(f"  at {self.line}")
        if self.rule:
            parts.append(f"  the rule stands at {self.rule}")
        if self.detail:
            parts.append(f"  {self.detail}")
        return "\n".join(parts)


@dataclass(frozen=True)
class Program:
    """One stage as something that runs: `call` as the caller calls it, or `joint` with cotangents handed in."""

    stage: str
    traces: tuple[Trace, ...]
    kind: str  # core · joint · split


@dataclass
class GraphCheck:
    compilation: Compilation
    inputs: list[object]
    comparisons: list[Comparison] = field(default_factory=list)

    # --- the reference ---

    def __post_init__(self) -> None:
        captured = self.compilation.captured
        self.core = core_of(captured.trace, captured)
        flags = enumerate(captured.requires_grad)
        trains = self.compilation.account.joint is not None
        self.wrt = [i for i, wanted in flags if trains and wanted and is_float(self.inputs[i])]
        self.mutated = [i for i, v in enumerate(captured.trace.inputs) if v in captured.trace.mutations]
        places: dict[Value, int] = {}
        for i, o in enumerate(captured.trace.outputs):
            if i not in captured.aliased and isinstance(o, Value):
                places.setdefault(o, i)
        # of each result of the core, its place among the caller's outputs; None where others are only made from it
        self.places = [i if i < captured.outputs else None for i in places.values()]
        # a derivative that is its author's own choice: autograd of what it computes is something else
        self.chosen = any(eqn.op in (CUSTOM_VJP, AUTOGRAD_FUNCTION) for eqn in self.core.equations)
        self.prepare()

    def prepare(self) -> None:
        """What the graph gives as PyTorch runs it, and in float64. Where these are further apart than rounding
        explains, PyTorch's own run is the reference too."""
        original = self.evaluate(lambda args: self.core_outputs(self.compilation.eager(*args)), self.inputs)
        eager = self.evaluate(self.traced(self.core, plain), self.inputs)
        reference = self.evaluate(self.traced(self.core, precisely), widen(self.inputs))
        comparisons = [compare(key, original[key], eager[key], reference[key]) for key in original]
        right = all(c is None or c.ok for c in comparisons)
        self.eager: Results = eager if right else original
        self.reference: Results = reference if right else {key: widen(x) for key, x in original.items()}
        self.precision = "float64" if right else "eager"

    def seed(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """The cotangent of output `index`: the same numbers whoever computes, in the output's own layout."""
        generator = torch.Generator().manual_seed(SEED + index)
        numbers = torch.randn(like.shape, generator=generator)
        return torch.empty_like(like).copy_(numbers)

    def evaluate(self, run: Callable[[list], Sequence[object]], inputs: list[object]) -> Results:
        """Outputs, written inputs and gradients of a differentiable program over the core's results."""
        leaves: list = [copied(x) for x in inputs]
        for i in self.wrt:
            leaves[i].requires_grad_()
        # a leaf that requires grad refuses writes, which the graph's own inputs, not leaves there, allow
        args = [x.clone() if i in self.wrt and i in self.mutated else x for i, x in enumerate(leaves)]
        with _seeded(inputs), torch.set_grad_enabled(bool(self.wrt)):
            outputs = [o if place is not None else None for o, place in zip(run(args), self.places, strict=True)]
            wrt = [leaves[i] for i in self.wrt]
            with torch.no_grad():
                seeds = [self.seed(i, o) if isinstance(o, torch.Tensor) else None for i, o in enumerate(outputs)]
            return self.named(outputs, args, gradients(outputs, wrt, seeds))

    def named(self, outputs: Sequence[object], args: Sequence[object], grads: Sequence[torch.Tensor | None]) -> Results:
        names = [v.name for v in self.core.inputs]
        results: Results = {f"output {i}": o for i, o in enumerate(outputs)}
        results.update({f"what is written to {names[i]}": args[i] for i in self.mutated})
        for i, grad in zip(self.wrt, grads, strict=True):  # no gradient and a gradient of zeros mean the same
            results[f"gradient of {names[i]}"] = torch.zeros_like(args[i]) if grad is None else grad  # type: ignore[arg-type]
        return {key: x.detach() if isinstance(x, torch.Tensor) else x for key, x in results.items()}

    def traced(self, trace: Trace, call: Call) -> Callable[[list], list]:
        """The program over a list of arguments; one that is written is replaced in the list, since autograd may have
        saved the old one."""
        how = differentiably(call) if self.wrt else call
        functional = trace.with_(mutations={}, outputs=(*trace.outputs, *trace.mutations.values()))

        def run(args: list) -> list:
            outputs = step(functional, args, call=how)
            for target, new in zip(trace.mutations, outputs[len(trace.outputs) :], strict=True):
                args[trace.inputs.index(target)] = new
            return outputs[: len(trace.outputs)]

        return run

    def core_outputs(self, caller: Sequence[object]) -> list[object]:
        """Of what a caller gets, the outputs that the core computes."""
        return [None if place is None else caller[place] for place in self.places]

    # --- programs ---

    @cached_property
    def programs(self) -> list[Program]:
        """Every stage that stands for the whole graph, in order."""
        programs: list[Program] = []
        halves: dict[str, Trace] = {}
        joined = False
        for stage, trace in self.compilation.account.stages:
            head = stage.split(" ")[0]
            if self.wrt and head in ("forward", "backward"):
                halves[head] = trace
                if len(halves) == 2:
                    programs.append(Program(stage, (halves["forward"], halves["backward"]), "split"))
            elif self.wrt and (stage == "vjp" or head == "joint"):
                joined = True
                programs.append(Program(stage, (trace,), "joint"))
            elif not joined:
                core = core_of(trace, self.compilation.captured) if stage == "captured" else trace
                programs.append(Program(stage, (core,), "core"))
        return programs

    def results(self, program: Program) -> Results:
        match program.kind:
            case "core":
                return self.evaluate(self.traced(program.traces[0], plain), self.inputs)
            case "split":
                boxed = [p.boxed for p in self.compilation.account.programs]
                call = self.compilation.executable.join(*map(_stepping, program.traces, boxed))
                return self.evaluate(lambda args: self.core_outputs(call(*args)), self.inputs)
        return self.joint_results(program.traces[0])

    def joint_results(self, trace: Trace) -> Results:
        args = [copied(x) for x in self.inputs]
        with _seeded(self.inputs), torch.no_grad():
            outputs = step(trace, [*args, *self.cotangents(trace)])
        count = len(self.core.outputs)
        joint = self.compilation.account.joint
        assert joint is not None
        shown = [o if place is not None else None for o, place in zip(outputs[:count], self.places, strict=True)]
        return self.named(shown, args, outputs[count : count + len(joint.wrt)])

    def cotangents(self, trace: Trace) -> list[torch.Tensor]:
        """For each result that backward pulls on; of a written input, which nobody differentiates here, zeros."""
        joint = self.compilation.account.joint
        assert joint is not None
        outputs = list(joint.trace.outputs[: len(self.core.outputs)])
        inputs = trace.inputs[len(self.core.inputs) :]
        cotangents = []
        for pulled, v in zip(joint.pulled, inputs, strict=True):
            index = outputs.index(pulled) if pulled in outputs else -1
            like = self.eager.get(f"output {index}")
            if isinstance(like, torch.Tensor):
                cotangents.append(self.seed(index, like))
            else:
                sizes = [size_hint(n) for n in v.shape]
                cotangents.append(torch.zeros(sizes, dtype=v.dtype, device=v.tensor.device))
        return cotangents

    # --- verdicts ---

    def compared(self, results: Results) -> list[Comparison]:
        comparisons = [compare(key, results[key], self.eager[key], self.reference[key]) for key in results]
        return [c for c in comparisons if c is not None]

    def wrong(self, program: Program) -> bool:
        comparisons = self.compared(self.results(program))
        skip = program.kind == "core" and self.chosen
        return any(not c.ok for c in comparisons if not (skip and c.what.startswith("gradient")))

    def results_are_right(self) -> bool:
        """Compare what the compiled graph computes."""
        call = self.compilation.executable.call
        final = self.evaluate(lambda args: self.core_outputs(call(*args)), self.inputs)
        self.comparisons = self.compared(final)
        return all(c.ok for c in self.comparisons)

    def run(self) -> list[Fault]:
        """Compare, and where something is wrong, find out why."""
        if not self.results_are_right():
            return [self.find()]
        return [self.rule_fault(wrong) for wrong in self.wrong_rules(user=True)]

    def find(self) -> Fault:
        """Bisect the stages between a right program and a wrong one."""
        programs = self.programs
        if self.wrong(programs[0]):
            return self.fault("captured", "the capture", None)
        low, high = 0, len(programs) - 1
        if not self.wrong(programs[high]):
            return self.generated_fault()
        while high - low > 1:
            middle = (low + high) // 2
            if self.wrong(programs[middle]):
                high = middle
            else:
                low = middle
        return self.blame(programs[low], programs[high])

    def blame(self, right: Program, wrong: Program) -> Fault:
        stage = wrong.stage
        name = stage.split(" ")[-1] if stage.split(" ")[0] in ("forward", "backward", "joint", "inference") else stage
        if name == "vjp":
            rules = self.wrong_rules(user=False)
            return self.rule_fault(rules[0]) if rules else self.fault(stage, "differentiation", None)
        where = self.first_wrong(right, wrong)
        if name == "claim":
            executor = self.wrong_executor(right, wrong)
            if executor is not None:
                return self.fault(stage, f"executor {executor.op.namespace!r}", executor)  # type: ignore[union-attr]
            return self.fault(stage, "an executor", where)
        return self.fault(stage, f"pass {name!r}", where)

    def generated_fault(self) -> Fault:
        """Every stage is right: what PyTorch's operators are bound to, or what stands around the program."""
        last = self.programs[-1]
        values = self.named_values(last, plain)
        for eqn in (eqn for trace in last.traces for eqn in trace.equations):
            if not isinstance(eqn.op, Special) and _bound_wrongly(eqn, values):
                return self.fault("generated", "executor 'aten'", eqn)
        return self.fault("generated", "the call around the generated program", None)

    # --- equations ---

    def named_values(self, program: Program, call: Call) -> Values:
        """Every tensor that a program computes, and its inputs, by name."""
        inputs = widen(self.inputs) if call is precisely else self.inputs
        args = [copied(x) for x in inputs]
        values: Values = {}
        with _seeded(self.inputs), torch.no_grad():
            if program.kind == "core":
                _run_named(program.traces[0], args, call, values)
            elif program.kind == "joint":
                cts = self.cotangents(program.traces[0])
                _run_named(program.traces[0], [*args, *(widen(cts) if call is precisely else cts)], call, values)
            else:
                forward, backward = program.traces
                _run_named(forward, args, call, values)
                joint = self.compilation.account.joint
                assert joint is not None
                names = [v.name for v in joint.trace.inputs[len(self.core.inputs) :]]
                cts = dict(zip(names, self.cotangents(joint.trace), strict=True))
                arguments = [values[v.name] if v.name in values else cts[v.name] for v in backward.inputs]
                _run_named(backward, arguments, call, values)
        return values

    def first_wrong(self, right: Program, wrong: Program) -> Equation | None:
        """The first equation of the wrong program whose result, by name, the right one computes otherwise."""
        reference = self.named_values(right, precisely)
        eager, ours = self.named_values(right, plain), self.named_values(wrong, plain)
        for trace in wrong.traces:
            for eqn in trace.equations:
                for v in eqn.results():
                    if v.name in ours and v.name in eager and v.name in reference:
                        comparison = compare(v.name, ours[v.name], eager[v.name], reference[v.name])
                        if comparison is not None and not comparison.ok:
                            return eqn
        return None

    def wrong_executor(self, right: Program, wrong: Program) -> Equation | None:
        """The first claimed equation that gives other results than what it stands for, on right inputs."""
        values = self.named_values(right, plain)
        for trace in wrong.traces:
            for eqn in trace.equations:
                op = eqn.op
                if not isinstance(op, Special) or (op.of is None and op.body is None):
                    continue
                if all(v.name in values for v in eqn.inputs()) and _claims_wrongly(eqn, op, values):
                    return eqn
        return None

    def wrong_rules(self, user: bool) -> list[WrongRule]:
        if not self.wrt or (user and not any(is_users(eqn) for eqn in self.core.equations)):
            return []
        before = [p for p in self.programs if p.kind == "core"][-1]
        return wrong_rules(before.traces[0], self.named_values(before, precisely), user)

    def rule_fault(self, wrong: WrongRule) -> Fault:
        detail = f"relative error {wrong.error:.3g} against {wrong.against}"
        return Fault(
            self.compilation.name, "vjp", f"vjp rule of {wrong.operator}", wrong.operator,
            _text(wrong.equation), line_of(wrong.equation), wrong.where, detail,
        )  # fmt: skip

    def fault(self, stage: str, guilty: str, eqn: Equation | None) -> Fault:
        detail = next((str(c) for c in self.comparisons if not c.ok), "")
        if eqn is None:
            return Fault(self.compilation.name, stage, guilty, detail=detail)
        operator = operator_name(eqn.op, eqn.args, eqn.kwargs)
        return Fault(self.compilation.name, stage, guilty, operator, _text(eqn), line_of(eqn), detail=detail)


def _run_named(trace: Trace, args: list, call: Call, values: Values) -> None:
    values.update({v.name: copied(x) for v, x in zip(trace.inputs, args, strict=True)})  # type: ignore[misc]
    values.update(values_of(trace, args, call)[1])


def _claims_wrongly(eqn: Equation, op: Special, values: Values) -> bool:
    """The executor's callable against the operators it was given, in float64 and in their own dtype."""
    body = op.body or Trace("claimed", tuple(dict.fromkeys(eqn.inputs())), (eqn.with_(op=op.of),), tuple(eqn.results()))
    args = [values[v.name] for v in body.inputs]
    mine = Trace("claim", tuple(dict.fromkeys(eqn.inputs())), (eqn,), tuple(eqn.results()), {}, {}, body.symbols)
    with torch.no_grad(), _seeded(args):
        ours = step(mine, [copied(values[v.name]) for v in mine.inputs])
    with torch.no_grad(), _seeded(args):
        eager = interp.run(body, *map(copied, args))
    with torch.no_grad(), _seeded(args):
        reference = step(body, widen(args), call=precisely)
    comparisons = [compare("", a, b, c) for a, b, c in zip(ours, eager, reference, strict=True)]
    return any(c is not None and not c.ok for c in comparisons)


def _bound_wrongly(eqn: Equation, values: Values) -> bool:
    """What the generated program calls for this equation against the operator itself."""
    inputs = tuple(dict.fromkeys(eqn.inputs()))
    if symbols_in((eqn.args, eqn.kwargs)) or not all(v.name in values for v in inputs):
        return False
    single = Trace("one", inputs, (eqn,), tuple(eqn.results()))
    results = []
    for call in (lambda eqn, args, kwargs: bind(eqn.op)(*args, **kwargs), plain):
        with torch.no_grad(), _seeded(list(values.values())):
            results.append(step(single, [copied(values[v.name]) for v in inputs], call=call))
    comparisons = [compare("", a, b, b) for a, b in zip(*results, strict=True)]
    return any(c is not None and not c.ok for c in comparisons)


def _text(eqn: Equation) -> str:
    single = Trace("one", tuple(dict.fromkeys(eqn.inputs())), (eqn,), ())
    return next(line.strip() for line, own in equation_lines(single) if own is eqn)


def copied(x: object) -> object:
    """A copy with the same strides; what is no tensor is itself."""
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        return x
    x = x.detach()
    copy = x.clone()
    if copy.stride() == x.stride() or not x.numel():
        return copy
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    memory = x.as_strided((extent,), (1,)).clone()
    return memory.as_strided(x.shape, x.stride())


class _seeded:
    """The same random numbers every time, and the caller's generators as they were afterwards."""

    def __init__(self, inputs: Sequence[object]) -> None:
        devices = {x.device for x in inputs if isinstance(x, torch.Tensor) and x.device.type == "cuda"}
        self.fork = torch.random.fork_rng(devices=list(devices))

    def __enter__(self) -> None:
        self.fork.__enter__()
        torch.manual_seed(SEED)

    def __exit__(self, *error: object) -> None:
        self.fork.__exit__(*error)


def _stepping(trace: Trace, boxed: bool) -> Callable:
    """A trace run equation by equation, called as its generated program is: with its inputs, or with one list."""
    if boxed:
        return lambda args: tuple(step(trace, args))
    return lambda *args: tuple(step(trace, args))
