"""A trace that repeats itself, as equal layers do, made short; and regions of the short one, made long again.

In: a trace. Out: `Short`, the same program with a few of its repeats left (`ir/repeats.py`), and where the others were.
`Short.extended` says of regions of the short program which ones the whole program has. It gives None where they do not
repeat themselves too; then the whole program has to be asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.ir.equation import Equation, Value
from tessera.ir.repeats import Repeats, number, repeats
from tessera.ir.trace import Trace

KEPT = 3  # repeats that are left at each end: what stands next to others may be fused in another way
LEAST = 3  # repeats that are worth taking out


@dataclass(frozen=True)
class Short:
    trace: Trace
    period: int  # equations
    cut: int  # the first equation that is left out
    gap: int  # equations that are left out

    def extended(self, regions: list[list[int]]) -> list[list[int]] | None:
        """Regions of the whole program, of those of the short one; None where they do not repeat."""
        before, last, after = (self._beginning(regions, self.cut + i * self.period) for i in (-2, -1, 0))
        if _moved(before, self.period) != last or _moved(last, self.period) != after:
            return None
        reach = self.cut  # of what begins before the last repeat; that itself may reach into the next one
        if any(region[-1] >= reach + (region in last) * self.period for region in regions if region[0] < self.cut):
            return None
        whole = [region for region in regions if region[0] < self.cut]
        for offset in range(self.period, self.gap + 1, self.period):
            whole += _moved(last, offset)
        whole += [[i + self.gap for i in region] for region in regions if region[0] >= self.cut]
        members = [i for region in whole for i in region]
        return sorted(whole) if len(members) == len(set(members)) else None

    def _beginning(self, regions: list[list[int]], place: int) -> list[list[int]]:
        """Regions that begin in the repeat which begins here."""
        return [region for region in regions if place <= region[0] < place + self.period]


def _moved(regions: list[list[int]], offset: int) -> list[list[int]]:
    return [[i + offset for i in region] for region in regions]


def shortened(trace: Trace) -> Short | None:
    """The trace without most of the repeats of one run of equations; None where nothing repeats often."""
    if trace.symbols or len(trace.equations) < (2 * KEPT + LEAST) * 2:
        return None
    for run in repeats(trace, [number(eqn) for eqn in trace.equations], 2 * KEPT + LEAST):
        if (short := without_repeats(trace, run)) is not None:
            return short
    return None


def without_repeats(trace: Trace, run: Repeats) -> Short | None:
    """The trace with few repeats of a run; None where what stands behind it reads from those that would go."""
    equations, gap, cut = trace.equations, (run.count - 2 * KEPT) * run.period, run.first + KEPT * run.period
    gone = {v: i for i in range(cut, cut + gap) for v in equations[i].results()}
    behind: list[Equation] = []
    for i in range(cut + gap, len(equations)):
        reads = {v: gone[v] for v in equations[i].inputs() if v in gone}
        if reads and (i >= run.end or min(reads.values()) - gap < run.first):
            return None
        nearer = {v: _nearer(trace, v, j, gap) for v, j in reads.items()}
        behind.append(equations[i].substitute(nearer) if reads else equations[i])
    short = trace.with_(
        equations=(*equations[:cut], *behind),
        outputs=tuple(o for o in trace.outputs if not isinstance(o, Value) or o not in gone),
        mutations={target: v for target, v in trace.mutations.items() if v not in gone},
    )
    return Short(short, run.period, cut, gap)


def _nearer(trace: Trace, v: Value, place: int, gap: int) -> Value:
    """The value that stands where `v` does, so many equations before it."""
    at = trace.equations[place].outputs.index(v)
    there = trace.equations[place - gap].outputs[at]
    assert there is not None
    return there
