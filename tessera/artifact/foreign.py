"""Operators of other libraries that Tessera has as well.

In: a captured program. Out: the same with Tessera's own in their places, since an artifact runs where those libraries
are not.
"""

from __future__ import annotations

from dataclasses import replace

from tessera.frontends.captured import Captured
from tessera.ir.trace import Trace
from tessera.ops.grouped import grouped_mm

OURS = {"transformers.grouped_mm_fallback.default": grouped_mm}


def with_own_operators(captured: Captured) -> Captured:
    done: dict[Trace, Trace] = {}

    def rewritten(trace: Trace) -> Trace:
        if trace not in done:
            equations = [
                eqn.with_(
                    op=OURS.get(str(eqn.op), eqn.op),
                    args=tuple(rewritten(a) if isinstance(a, Trace) else a for a in eqn.args),
                )
                for eqn in trace.equations
            ]
            done[trace] = trace.with_(equations=tuple(equations))
        return done[trace]

    return replace(captured, trace=rewritten(captured.trace))
