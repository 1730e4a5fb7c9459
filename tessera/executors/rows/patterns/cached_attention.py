"""Two cache writes and the attention that reads them as one `cached_attention`: one kernel in place of three.

In: a final program, where writes happen in place. Out: the same program, where an attention whose keys and values were
both written just before it, at the same positions, does the writes itself. "Just before" means that nothing in between
reads the caches or writes anything else: the writes may then as well happen later. A cache that has its length before
its heads is written as it lies, and read transposed.
"""

from __future__ import annotations

import torch

from tessera.ir.equation import Equation, Operator, Special, Value
from tessera.ir.schema import schema_of
from tessera.ir.trace import Trace
from tessera.ops.rows.operators import PLAIN
from tessera.passes.memory.alias import Roots, always_view, roots
from tessera.torch_internals.operators import OpOverload

ops = torch.ops.tessera
WRITE, ATTENTION, CACHED = ops.cache_write.default, ops.decode_attention.default, ops.cached_attention.default


def joined(trace: Trace) -> Trace:
    """Attention that writes what is new in its caches."""
    if all(eqn.op is not WRITE for eqn in trace.equations):
        return trace
    of = roots(trace)
    equations: list[Equation] = []
    for eqn in trace.equations:
        writes = _writes(equations, eqn, of) if operator_of(eqn.op) is ATTENTION else None
        if writes is None:
            equations.append(eqn)
            continue
        equations = [e for e in equations if e not in writes]
        equations.append(_join(eqn, *writes))
    return trace.with_(equations=tuple(equations))


def operator_of(op: Operator) -> OpOverload | None:
    """The operator that an equation runs, whoever claimed it."""
    return op.of if isinstance(op, Special) else op


def _writes(before: list[Equation], attention: Equation, of: Roots) -> tuple[Equation, Equation] | None:
    """What wrote the keys and what wrote the values of an attention, if both may happen as late as it does."""
    _, k, v, positions = attention.args[:4]
    assert isinstance(k, Value) and isinstance(v, Value)
    caches = of[k] | of[v]
    if of[k] & of[v] or any(of[x] & caches for x in attention.inputs() if x not in (k, v)):
        return None
    makers = {result: eqn for eqn in before for result in eqn.results()}
    wanted = [_lies(makers, x) for x in (k, v)]
    writes: dict[tuple[Value, int], Equation] = {}
    for eqn in reversed(before):
        where = (eqn.args[0], eqn.args[3]) if eqn.op is WRITE else None
        if where in wanted and where not in writes:
            writes[where] = eqn  # type: ignore[index]
            if len(writes) == 2:
                break
        elif not _may_wait(eqn, caches, of):
            return None
    if len(writes) < 2:
        return None
    keys, values = (writes[where] for where in wanted)
    if any(of[x] & caches for eqn in (keys, values) for x in eqn.inputs()[1:]):
        return None
    same = keys.args[2] is values.args[2] and positions in (None, keys.args[2])
    return (keys, values) if same and values.args[4:] == PLAIN else None


def _lies(makers: dict[Value, Equation], v: Value) -> tuple[Value, int]:
    """The cache that attention reads, as the program has it, and where it has its length."""
    eqn = makers.get(v)
    if eqn is None or eqn.op is not torch.ops.aten.transpose.int or {d % 4 for d in eqn.args[1:]} != {1, 2}:  # type: ignore[operator]
        return v, 2
    return eqn.inputs()[0], 1


def _may_wait(eqn: Equation, caches: frozenset[Value], of: Roots) -> bool:
    """A write to the caches may happen after this equation as well as before it."""
    op = eqn.op
    if isinstance(op, Special) and op.of is None:  # a region that writes nothing
        reads_only = op.body is not None and op.pure and not (op.recipe is not None and op.recipe.over)
    else:
        op = operator_of(op)
        reads_only = op is not None and not schema_of(op).mutated
    is_view = isinstance(op, OpOverload) and always_view(op)
    return reads_only and (is_view or not any(of[x] & caches for x in eqn.inputs()))


def _join(attention: Equation, keys: Equation, values: Equation) -> Equation:
    q, k, v, positions, mask, *prepare, scale = attention.args
    _, new, at, _, *prepare_key = keys.args
    args = (q, k, v, new, values.args[1], at, positions is not None, mask, *prepare, *prepare_key, scale)
    return attention.with_(op=CACHED, args=args)
