"""Puts the bodies of calls and checkpoints in place.

In: a trace, as captured. Out: one with no `tessera.call` and no `tessera.checkpoint`; the equations of a checkpoint's
body are marked to be run again in backward. First among the passes, since no other looks into bodies: what a block
computes is cleaned, differentiated and fused together with what stands around it.
"""

from __future__ import annotations

from tessera.ir.call import in_place
from tessera.ir.trace import Trace


def inline(trace: Trace) -> Trace:
    """The same program with the bodies of calls in place."""
    return in_place(trace)
