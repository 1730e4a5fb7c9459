"""Operators that write their arguments, and the user's Triton kernels, write where they wrote in the user's program.

In: a trace in its final order. Out: the same trace where a call that would write a copy writes the tensor itself,
because nobody reads its old contents any more: a tensor made to be written (`torch.empty`), or an input of the program
that ends up holding just what was written. Calls that write one tensor and give nothing else are `writes`' part.
"""

from __future__ import annotations

from tessera.ir.alias import FUNCTIONAL, FUNCTIONAL_OVER, written_by
from tessera.ir.equation import Equation, Value, values_in
from tessera.ir.trace import Trace
from tessera.ops.launch import LAUNCH
from tessera.passes.memory.alias import Roots, last_touches, roots


def write_over(trace: Trace) -> Trace:
    """Write in place where nobody can tell."""
    if all(eqn.op is not LAUNCH and eqn.op is not FUNCTIONAL for eqn in trace.equations):
        return trace
    return _Calls(trace).run()


class _Calls:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.of: Roots = roots(trace)
        self.mutations = dict(trace.mutations)
        self.last = last_touches(trace.equations, self.of)
        self.read = {v for eqn in trace.equations for v in eqn.inputs()} | set(values_in(trace.outputs))

    def run(self) -> Trace:
        equations = [self.call(i, eqn) for i, eqn in enumerate(self.trace.equations)]
        return self.trace.with_(equations=tuple(equations), mutations=self.mutations)

    def call(self, index: int, eqn: Equation) -> Equation:
        if eqn.op is LAUNCH:
            arguments, written = eqn.args[4], eqn.args[5]
            assert isinstance(arguments, dict) and isinstance(written, list)
            targets = [arguments[name] for name in written]
            over = self.over(index, eqn, targets)
            return self.lie_as(eqn, targets, over).with_(kwargs={"over": [written[i] for i in over]}) if over else eqn
        if eqn.op is FUNCTIONAL:
            op, *args = eqn.args
            targets = written_by(op, args, eqn.kwargs)  # type: ignore[arg-type]
            over = self.over(index, eqn, targets)
            return self.lie_as(eqn, targets, over).with_(op=FUNCTIONAL_OVER, args=(op, over, *args)) if over else eqn
        return eqn

    def over(self, index: int, eqn: Equation, targets: list[Value]) -> list[int]:
        """Which targets may be written themselves; the last results of the call are what they hold."""
        over = []
        for i, (target, result) in enumerate(zip(targets, eqn.outputs[-len(targets) :], strict=True)):
            if result is None or not self.unread(target, index, eqn):
                continue
            if result in self.read and not result.tensor.lies_like(target.tensor):
                continue
            if self.made_here(target) and not self.held(target):
                over.append(i)
            elif self.mutations.get(target) is result and not self.held(target, but=result) and not self.given(result):
                over.append(i)
                self.mutations[target] = target  # it holds what it should already
        return over

    def lie_as(self, eqn: Equation, targets: list[Value], over: list[int]) -> Equation:
        """The call, whose last results lie in memory as the targets do that it writes itself."""
        outputs = list(eqn.outputs)
        for i in over:
            at, result = i - len(targets), outputs[i - len(targets)]
            if result is not None and not result.tensor.lies_like(targets[i].tensor):
                outputs[at] = Value(result.name, targets[i].type)
        return eqn.with_(outputs=tuple(outputs))

    def unread(self, target: Value, index: int, eqn: Equation) -> bool:
        """Nothing after the call, and nothing else in it, looks at the target's memory."""
        memory, inputs = self.of[target], eqn.inputs()
        others = [v for v in inputs if v is not target]
        once = eqn.op is LAUNCH or inputs.count(target) == 1  # a launch knows parameters that are one tensor
        alone = once and all(memory.isdisjoint(self.of[v]) for v in others)
        return alone and all(self.last[r] <= index for r in memory)

    def made_here(self, target: Value) -> bool:
        return self.of[target].isdisjoint({*self.trace.inputs, *self.trace.constants})

    def held(self, target: Value, but: Value | None = None) -> bool:
        """Somebody outside gets the target's memory."""
        return any(not self.of[v].isdisjoint(self.of[target]) for v in self.trace.results() if v is not but)

    def given(self, result: Value) -> bool:
        return any(not self.of[v].isdisjoint(self.of[result]) for v in values_in(self.trace.outputs))
