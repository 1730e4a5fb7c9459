"""`reduce_exp` on the CPU: a running maximum and a running total in every lane.

An element costs one exponential: of the smaller minus the larger of itself and the maximum so far, which either is
its own share of the total or rescales what was there. NaN is not in the maximum while the loop runs, but it stays in
the total, which is how the maximum learns of it at the end. What is taken off is kept finite, so that no two
infinities meet.
"""

from __future__ import annotations

import sys

from tessera.tile.targets.cpu.code import V
from tessera.tile.targets.cpu.elements import Element
from tessera.tile.targets.cpu.functions import FLOAT
from tessera.tile.targets.cpu.host import HostCode as Code
from tessera.tile.targets.cpu.reduce import Kind, Parts, halved

LARGEST = {"float": (2 - 2.0**-23) * 2.0**127, "double": sys.float_info.max}


def pair(fn: str, infinite: str, e: Element) -> Kind:
    """The largest element, and the sum of fn(element - largest); short floats come as float32."""
    elem = "float" if e.short else e.register
    exp = FLOAT[fn]

    def finite(b: Code, x: V) -> V:
        high = b.like(x, LARGEST[elem])
        x = b.select(b.compare("ogt", x, high), high, x)
        return b.select(b.compare("olt", x, b.fneg(high)), b.fneg(high), x)

    def absorb(b: Code, p: Parts, x: V) -> Parts:
        grows = b.compare("ogt", x, p[0])
        high, low = b.select(grows, x, p[0]), b.select(grows, p[0], x)  # low is x where that is NaN
        share = exp(b, b.fsub(low, finite(b, high)))
        return high, b.select(grows, b.fma(p[1], share, b.like(x, 1.0)), b.fadd(p[1], share))

    def merge(b: Code, p: Parts, q: Parts) -> Parts:
        high = b.select(b.compare("ogt", q[0], p[0]), q[0], p[0])
        base = finite(b, high)
        ours, theirs = (b.fmul(total, exp(b, b.fsub(top, base))) for top, total in (p, q))
        return high, b.fadd(ours, theirs)

    def join(b: Code, parts: Parts, lanes: int) -> Parts:
        """All lanes against their common maximum: one exponential, where half with half takes one after another."""
        tops, totals = parts
        (high,) = halved(b, lambda b, p, q: (b.select(b.compare("ogt", q[0], p[0]), q[0], p[0]),), (tops,), lanes)
        picks = ", ".join(f"i32 {k % high.lanes}" for k in range(tops.lanes))
        base = finite(b, high)
        repeated = b.value(f"shufflevector {base}, {base}, <{tops.lanes} x i32> <{picks}>", elem, tops.lanes)
        totals = b.fmul(totals, exp(b, b.fsub(tops, repeated)))
        (total,) = halved(b, lambda b, p, q: (b.fadd(p[0], q[0]),), (totals,), lanes)
        return high, total

    def finish(b: Code, parts: Parts) -> Parts:
        top, total = parts
        nan = b.like(top, float("nan"))
        is_nan = b.compare("uno", total, total)
        end = b.compare("oeq", b.call("fabs", top), b.like(top, float("inf")))
        least = b.select(b.compare("ogt", top, b.like(top, 0.0)), b.like(top, float("inf")), b.like(top, 0.0))
        total = b.select(end, least if infinite == "zero" else nan, total)
        return b.select(is_nan, nan, top), b.select(is_nan, nan, total)

    start = ((elem, float("-inf")), (elem, 0.0))
    return Kind(start, float("-inf"), merge, finish=finish, cascade=True, absorb=absorb, join=join)
