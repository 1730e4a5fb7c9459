"""A captured program with few of its equal layers left.

In: a captured program. Out: `Shortened`: the same with three repeats at each end of a run of equal layers, and which
inputs belong to which layer (chains), so that what is compiled for the short program can be made long again
(`stretch.py`). None where nothing repeats often, or where layers differ in what compiling looks at: whether they want
gradients, the tags of their equations (checkpoints), outputs of the program inside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tessera.frontends.captured import Captured
from tessera.ir.aliased import Aliased
from tessera.ir.equation import Value, values_in
from tessera.ir.repeats import Repeats, number, repeats
from tessera.ir.trace import Trace
from tessera.passes.clean.inline import inline
from tessera.passes.fuse.repeats import KEPT, without_repeats

LEAST = 6  # repeats that are worth taking out


@dataclass(frozen=True)
class Chain:
    """What each repeat reads in the same place: the whole program's, and how many stand before those taken out."""

    values: tuple[Value, ...]
    before: int

    def left(self, gone: int) -> tuple[Value, ...]:
        return (*self.values[: self.before], *self.values[self.before + gone :])


@dataclass(frozen=True)
class Shortened:
    whole: Captured
    short: Captured
    chains: tuple[Chain, ...]  # of inputs
    gone: int  # repeats that were taken out


def shortened(captured: Captured) -> Shortened | None:
    """The program without most of the repeats of one run of layers."""
    if captured.placed or not {v for v, _ in captured.trace.symbols.values()} <= set(captured.trace.inputs):
        return None
    trace = inline(captured.trace)
    numbers = [(number(eqn), eqn.tags) for eqn in trace.equations]
    for run in repeats(trace, numbers, 2 * KEPT + LEAST):
        chains = list(_chains(trace, run))
        if all(_alike(chain, captured, trace) for chain in chains) and chains:
            short = _without(replace(captured, trace=trace), run, chains)
            if short is not None:
                return short
    return None


def _chains(trace: Trace, run: Repeats) -> Iterator[Chain]:
    following = dict(run.following)
    target_of = {v: target for target, v in trace.mutations.items()}
    for i in range(run.first, run.end - run.period):
        pairs = zip(trace.equations[i].results(), trace.equations[i + run.period].results(), strict=True)
        following.update((target_of[v], target_of[w]) for v, w in pairs if v in target_of and w in target_of)
    turns = _turns(trace, run)
    for value in following.keys() - set(following.values()):
        values = [value]
        while values[-1] in following and len(values) <= len(following):
            values.append(following[values[-1]])
        # Of one that more than one repeat reads, or something else, there is no saying which layer's it is.
        regular = [turns.get(v) for v in values] == [{turn} for turn in range(len(values))] and len(values) >= run.count
        yield Chain(tuple(values), KEPT if regular else 0)


def _turns(trace: Trace, run: Repeats) -> dict[Value, set[int]]:
    """The repeats that read or write an input; those of other equations have numbers of their own."""
    turns: dict[Value, set[int]] = {}
    given = set(trace.inputs)
    for i, eqn in enumerate(trace.equations):
        turn = (i - run.first) // run.period
        for v in eqn.inputs():
            if v in given:
                turns.setdefault(v, set()).add(turn)
    places = trace.places()
    for target, v in trace.mutations.items():
        turns.setdefault(target, set()).add((places.get(v, -1) - run.first) // run.period)
    return turns


def _alike(chain: Chain, captured: Captured, trace: Trace) -> bool:
    """Inputs that only their layer's equations read, and that the caller treats alike."""
    places = {v: i for i, v in enumerate(trace.inputs)}
    outputs = {*values_in(trace.outputs), *(v for v, _ in trace.symbols.values())}
    if not chain.before or any(v not in places or v in outputs for v in chain.values):
        return False
    numbers = [places[v] for v in chain.values]
    aliased = {alias.source for alias in captured.aliased.values() if not alias.of_output}
    treated = {(captured.requires_grad[i], i in captured.uncounted, trace.inputs[i].type.key()) for i in numbers}
    return len(treated) == 1 and aliased.isdisjoint(numbers)


def _without(captured: Captured, run: Repeats, chains: list[Chain]) -> Shortened | None:
    trace, count = captured.trace, run.count - 2 * KEPT
    short = without_repeats(trace, run)
    if short is None or len(short.trace.outputs) != len(trace.outputs):
        return None
    gone = {v for chain in chains for v in chain.values[chain.before : chain.before + count]}
    kept = [i for i, v in enumerate(trace.inputs) if v not in gone]
    moved = {i: k for k, i in enumerate(kept)}
    inputs = tuple(trace.inputs[i] for i in kept)
    reads = {v for eqn in short.trace.equations for v in eqn.inputs()}
    if not reads.isdisjoint(gone) or not gone.isdisjoint(short.trace.mutations):
        return None
    short = replace(
        captured,
        trace=short.trace.with_(inputs=inputs),
        aliased={k: _moved(alias, moved) for k, alias in captured.aliased.items()},
        requires_grad=tuple(captured.requires_grad[i] for i in kept),
        uncounted=tuple(moved[i] for i in captured.uncounted if i in moved),
    )
    return Shortened(captured, short, tuple(chains), count)


def _moved(alias: Aliased, places: dict[int, int]) -> Aliased:
    return alias if alias.of_output else replace(alias, source=places[alias.source])
