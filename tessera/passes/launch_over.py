"""Lets Triton kernels of the user's write where they wrote in the user's program.

In: a trace in its final order. Out: the same trace where a launch that would write a copy writes the tensor itself,
because nobody reads its old contents any more: a tensor made to be written (`torch.empty`), or an input of the program
that ends up holding just what the kernel wrote.
"""

from __future__ import annotations

from tessera.ir.equation import Equation, Value, values_in
from tessera.ir.trace import Trace
from tessera.ops.launch import LAUNCH
from tessera.passes.alias import Roots, roots


def launch_over(trace: Trace) -> Trace:
    """Write in place where nobody can tell."""
    if all(eqn.op is not LAUNCH for eqn in trace.equations):
        return trace
    return _Launches(trace).run()


class _Launches:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.of: Roots = roots(trace)
        self.mutations = dict(trace.mutations)
        self.last: dict[Value, int] = {}  # memory -> the last equation that reads it
        for index, eqn in enumerate(trace.equations):
            for v in eqn.inputs():
                self.last.update(dict.fromkeys(self.of[v], index))

    def run(self) -> Trace:
        equations = [self.launch(i, e) if e.op is LAUNCH else e for i, e in enumerate(self.trace.equations)]
        return self.trace.with_(equations=tuple(equations), mutations=self.mutations)

    def launch(self, index: int, eqn: Equation) -> Equation:
        arguments, written = eqn.args[4], eqn.args[5]
        assert isinstance(arguments, dict) and isinstance(written, list)
        over = []
        for name, result in zip(written, eqn.outputs, strict=True):
            target = arguments[name]
            if result is None or not self.unread(target, index, arguments):
                continue
            if self.made_here(target) and not self.held(target):
                over.append(name)
            elif self.mutations.get(target) is result and not self.held(target, but=result) and not self.given(result):
                over.append(name)
                self.mutations[target] = target  # it holds what it should already
        return eqn.with_(kwargs={"over": over}) if over else eqn

    def unread(self, target: Value, index: int, arguments: dict) -> bool:
        """Nothing after the launch, and nothing else in it, looks at the target's memory."""
        memory = self.of[target]
        others = [v for v in values_in(arguments) if v is not target]
        return all(self.last[r] <= index for r in memory) and all(memory.isdisjoint(self.of[v]) for v in others)

    def made_here(self, target: Value) -> bool:
        return self.of[target].isdisjoint({*self.trace.inputs, *self.trace.constants})

    def held(self, target: Value, but: Value | None = None) -> bool:
        """Somebody outside gets the target's memory."""
        return any(not self.of[v].isdisjoint(self.of[target]) for v in self.trace.results() if v is not but)

    def given(self, result: Value) -> bool:
        return any(not self.of[v].isdisjoint(self.of[result]) for v in values_in(self.trace.outputs))
