"""What must come before what in a trace.

In: a trace, functional or with writes in place. Out: for every equation the earlier equations it must follow:
makers of what it reads, the effect before it where it has one, the maker of a run-time size it mentions, and
around a write every equation that touches the written memory.
"""

from __future__ import annotations

from tessera.ir.equation import Equation, Special, Value, values_in
from tessera.ir.schema import has_effect, schema_of
from tessera.ir.trace import Trace
from tessera.passes.clean.dce import mentioned
from tessera.passes.memory.alias import Roots, roots, shown
from tessera.torch_internals.operators import OpOverload


def dependencies(trace: Trace, of: Roots | None = None) -> list[set[int]]:
    """`needs[i]` are the equations that equation i must come after."""
    maker = trace.places()
    late_symbols = {s: maker[v] for s, (v, _) in trace.symbols.items() if v in maker}
    writes = any(map(written, trace.equations))
    if writes and of is None:
        of = roots(trace)
    wrote: dict[Value, int] = {}  # memory -> its last write
    touched: dict[Value, list[int]] = {}  # memory -> who looked at it since
    needs: list[set[int]] = []
    effect = -1
    for index, eqn in enumerate(trace.equations):
        inputs = eqn.inputs()
        need = {maker[v] for v in inputs if v in maker}
        if late_symbols:
            need |= {late_symbols[s] for s in mentioned((eqn.args, eqn.kwargs)) if s in late_symbols}
        if has_effect(eqn):
            if effect >= 0:
                need.add(effect)
            effect = index
        if writes:
            assert of is not None
            into = shown(written(eqn), of)
            for root in shown(inputs, of):
                if root in wrote:
                    need.add(wrote[root])
                if root in into:
                    need.update(touched.pop(root, ()))
                    wrote[root] = index
                else:
                    touched.setdefault(root, []).append(index)
        need.discard(index)
        needs.append(need)
    return needs


def written(eqn: Equation) -> list[Value]:
    """Arguments that this equation writes in place; none in a functional trace."""
    op: object = eqn.op
    if isinstance(op, Special):
        if op.of is None:
            return []
        op = op.of
    assert isinstance(op, OpOverload)
    schema = schema_of(op)
    if not schema.mutated:
        return []
    targets: list[Value] = []
    for i in schema.mutated:
        param = schema.params[i]
        held = eqn.args[i] if not param.keyword and i < len(eqn.args) else eqn.kwargs.get(param.name)
        targets += values_in(held)
    return targets
