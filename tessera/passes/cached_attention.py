"""Two cache writes and the attention that reads them as one `cached_attention`: one kernel in place of three.

In: a final program, where writes happen in place. Out: the same program, where a `decode_attention` whose keys and
values were both written just before it, at the same position, does the writes itself. "Just before" means that nothing
in between touches the caches or writes anything else: the writes may then as well happen later.
"""

from __future__ import annotations

import torch

from tessera.ir.equation import Equation, Value
from tessera.ir.schema import schema_of
from tessera.ir.trace import Trace
from tessera.passes.memory.alias import Roots, roots
from tessera.torch_internals.operators import OpOverload

ops = torch.ops.tessera
PLAIN = (None, 0.0, 0.0, None, None)  # neither normalised nor turned


def cached_attention(trace: Trace) -> Trace:
    """Attention that writes what is new in its caches."""
    if all(eqn.op is not ops.cache_write.default for eqn in trace.equations):
        return trace
    of = roots(trace)
    equations: list[Equation] = []
    for eqn in trace.equations:
        writes = _writes(equations, eqn, of) if eqn.op is ops.decode_attention.default else None
        if writes is None:
            equations.append(eqn)
            continue
        equations = [e for e in equations if e not in writes]
        equations.append(_joined(eqn, *writes))
    return trace.with_(equations=tuple(equations))


def _writes(before: list[Equation], attention: Equation, of: Roots) -> tuple[Equation, Equation] | None:
    """What wrote the keys and what wrote the values of an attention, if both may happen as late as it does."""
    q, k, v, positions = attention.args[:4]
    assert isinstance(q, Value) and isinstance(k, Value) and isinstance(v, Value)
    caches = of[k] | of[v]
    if of[k] & of[v] or any(of[x] & caches for x in attention.inputs() if x not in (k, v)):
        return None
    found: dict[Value, Equation] = {}
    for eqn in reversed(before):
        if eqn.op is ops.cache_write.default and eqn.args[0] in (k, v) and eqn.args[0] not in found:
            found[eqn.args[0]] = eqn  # type: ignore[index]
            if len(found) == 2:
                break
        elif not _reads_only(eqn) or any(of[x] & caches for x in eqn.inputs()):
            return None
    if len(found) < 2:
        return None
    keys, values = found[k], found[v]
    same = keys.args[2] is values.args[2] and positions in (None, keys.args[2])
    return (keys, values) if same and values.args[3:] == PLAIN else None


def _reads_only(eqn: Equation) -> bool:
    return isinstance(eqn.op, OpOverload) and not schema_of(eqn.op).mutated


def _joined(attention: Equation, keys: Equation, values: Equation) -> Equation:
    q, k, v, positions, mask, *how, scale = attention.args
    _, new, at, *turned = keys.args
    args = (q, k, v, new, values.args[1], at, positions is not None, mask, *how, *turned, scale)
    return attention.with_(op=ops.cached_attention.default, args=args)
