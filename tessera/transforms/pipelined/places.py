"""Where the forward of a pipeline is cut: by cost, at modules, or where weights already are.

In: the equations of a forward in order, and for each the weights it reads. Out: the stage of each equation. By cost, a
cut may be moved a little to where fewer bytes cross. A cut that weights decide stands between the last equation that
reads a weight of the stage before and the first that reads one of the stage after; there the fewest bytes decide.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from tessera.ir.equation import Equation, Value
from tessera.ir.types import TensorType
from tessera.ops.op import bytes_moved, flops
from tessera.util.errors import OptionError

NEAR = 0.2  # of a stage's cost: how far from the best place a cut may be moved for fewer bytes
BYTE = 100.0  # operations that a device does while it moves a byte


class Held(NamedTuple):
    """Who has a weight along a pipeline."""

    owner: int  # the rank that updates it
    ranks: tuple[int, ...]  # all that have it
    stages: tuple[int, ...]  # those that read it; a rank may have several


@dataclass(frozen=True)
class Where:
    """What decides the cuts, where that is not their cost."""

    starts: Sequence[Collection[Value]] = ()  # the weights of the module that each stage but the first begins with
    homes: Mapping[Value, Collection[int]] | None = None  # of weights, the stages that have them already; of results,
    # the stage that shall make each
    choices: Sequence[int] = ()  # of each cut that weights decide: 0 is where the fewest bytes cross, 1 the next place


class NoOtherPlace(OptionError):
    """All places between two stages were tried."""


def cost_of(eqn: Equation) -> float:
    return flops(eqn) + BYTE * bytes_moved(eqn)


def stages_of(
    work: Sequence[Equation],
    weights: Sequence[Collection[Value]],
    count: int,
    where: Where,
    inside: Collection[int] = (),
) -> dict[Equation, int]:
    """The stage of each equation; `weights` are those that each equation reads, and results that it makes. Cuts stand
    before none of the equations `inside` of what one stage must do, as long as there are other places."""
    if count > len(work):
        raise OptionError(f"pipeline: expected at most {len(work)} stages, as many as there is work for, got {count}")
    reading = [e for e, read in zip(work, weights, strict=True) if read]
    if where.homes is None and reading and count > len(reading):
        raise OptionError(
            f"pipeline: expected at most {len(reading)} stages, as many as equations read weights, got {count}; the "
            f"last of them is {reading[-1].op} at {reading[-1].source}"
        )
    crossing = _crossing(work)
    if where.homes is not None:
        choices = where.choices or [0] * (count - 1)
        windows = [_window(weights, where.homes, k) for k in range(1, count)]
        cuts = [_narrowest(crossing, inside, *window, n) for window, n in zip(windows, choices, strict=True)]
    elif where.starts:
        cuts = [_narrowest(crossing, inside, *_before(weights, start)) for start in where.starts]
    else:
        cuts = _by_cost([cost_of(e) for e in work], crossing, inside, count)
    cuts = [0, *cuts, len(work)]
    if any(a > b for a, b in zip(cuts, cuts[1:], strict=False)):
        raise OptionError("pipeline: expected stages in the order in which the program runs, got modules in another")
    return {work[i]: k for k in range(count) for i in range(cuts[k], cuts[k + 1])}


def _by_cost(costs: Sequence[float], crossing: Sequence[int], inside: Collection[int], count: int) -> list[int]:
    sums = list(accumulate(costs, initial=0.0))
    cuts = [0]
    for k in range(1, count):
        ideal, slack = sums[-1] * k / count, sums[-1] / count * NEAR
        behind = range(cuts[-1] + 1, len(costs) - (count - k) + 1)
        places = [i for i in behind if i not in inside] or behind
        near = [i for i in places if abs(sums[i] - ideal) <= slack] or [min(places, key=lambda i: abs(sums[i] - ideal))]
        cuts.append(min(near, key=lambda i: (crossing[i], abs(sums[i] - ideal))))
    return cuts[1:]


def _crossing(work: Sequence[Equation]) -> list[int]:
    """For a cut before each equation, the bytes of what is computed before and read after it."""
    computed, last = dict[Value, int](), dict[Value, int]()
    for i, eqn in enumerate(work):
        computed.update(dict.fromkeys(eqn.results(), i))
        last.update(dict.fromkeys(eqn.inputs(), i))
    steps = [0] * (len(work) + 1)
    for v, i in computed.items():
        if v in last and isinstance(v.type, TensorType):
            steps[i + 1] += v.nbytes()
            steps[last[v] + 1] -= v.nbytes()
    return list(accumulate(steps))


def _narrowest(crossing: Sequence[int], inside: Collection[int], first: int, last: int, choice: int = 0) -> int:
    """Of the places from first to last the one where the fewest bytes cross; the latest of such."""
    places = sorted(range(first, last + 1), key=lambda i: (i in inside, crossing[i], -i))
    if choice == len(places):
        raise NoOtherPlace("pipeline: expected a program that can be cut where its weights are")
    return places[choice]


def _before(weights: Sequence[Collection[Value]], start: Collection[Value]) -> tuple[int, int]:
    """Between what reads other weights and the first equation that reads one of these."""
    last = next((i for i, read in enumerate(weights) if any(v in start for v in read)), None)
    if last is None:
        raise OptionError("pipeline: expected modules whose weights the program reads, got one whose it does not")
    return max((i + 1 for i, read in enumerate(weights[:last]) if read), default=0), last


def _window(
    weights: Sequence[Collection[Value]], homes: Mapping[Value, Collection[int]], stage: int
) -> tuple[int, int]:
    """Between the last equation that reads a weight of an earlier stage alone and the first of a later one."""
    early = [i for i, read in enumerate(weights) if any(max(homes.get(v, ()), default=stage) < stage for v in read)]
    late = [i for i, read in enumerate(weights) if any(min(homes.get(v, ()), default=-1) >= stage for v in read)]
    first, last = max(early, default=-1) + 1, min(late, default=len(weights))
    if first > last:
        raise OptionError(
            f"pipeline: expected a program that reads weights in the order of the stages that have them, got one in "
            f"which stage {stage} reads after a weight of its own one of an earlier stage"
        )
    return first, last
