"""Regions that write a mutated input where it stands.

A region's kernel may offer to write a result over one of its arguments (`ir/kernel.py`): `overwrites[result]` are the
arguments it could be, by position, and `writing({result: argument})` is the same kernel with these results written in
place and not given back. `plan_regions` finds the mutated inputs whose new contents such a region computes, and what
must come before it; `write_regions` puts the writing kernels in. Nobody may read the old contents after the region, and
nobody outside may hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tessera.ir.equation import Equation, Special, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.passes.memory.alias import Roots, escaping, roots, shown


@dataclass
class RegionWrite:
    """Equation `index` writes its result number `result` over its argument `place`, the input `target`."""

    target: Value
    index: int
    result: int
    place: int
    waits: list[tuple[int, int]] = field(default_factory=list)  # (equation, this one) in this order


def plan_regions(trace: Trace, of: Roots | None = None) -> list[RegionWrite]:
    """The mutated inputs that a region can write itself."""
    offered = {
        v: (index, k)
        for index, eqn in enumerate(trace.equations)
        if offers_of(eqn)
        for k, v in enumerate(eqn.results())
    }
    wanted = {t: offered[v] for t, v in trace.mutations.items() if t is not v and v in offered}
    if not wanted:
        return []
    of = of if of is not None else roots(trace)
    readers = _readers(trace, of, set(wanted))
    held = escaping(trace, of)
    writes = []
    for target, (index, k) in wanted.items():
        eqn = trace.equations[index]
        value = trace.mutations[target]
        offers = offers_of(eqn).get(k, ())
        place = next((j for j in offers if eqn.args[j] is target), -1)
        legal = (
            place >= 0
            and value.type == target.type
            and target not in held
            and value not in held
            and eqn.inputs().count(target) == 1
            and all(v is target or target not in of[v] for v in eqn.inputs())
            and all(target not in of[v] for t, v in trace.mutations.items() if t is not target)
            and all(reader <= index for reader in readers[target])
        )
        if legal:
            writes.append(RegionWrite(target, index, k, place, [(r, index) for r in readers[target] if r != index]))
    return writes


def offers_of(eqn: Equation) -> Mapping[int, tuple[int, ...]]:
    """By the number of a result, the arguments that it may be written over."""
    return eqn.op.kernel.overwrites if isinstance(eqn.op, Special) and eqn.op.kernel is not None else {}


def _readers(trace: Trace, of: Roots, targets: set[Value]) -> dict[Value, list[int]]:
    """Who reads each target's memory."""
    readers: dict[Value, list[int]] = {t: [] for t in targets}
    for index, eqn in enumerate(trace.equations):
        for root in shown(eqn.inputs(), of) & targets:
            readers[root].append(index)
    return readers


def write_regions(trace: Trace) -> Trace:
    """Let regions write what they can."""
    planned = plan_regions(trace)
    if not planned:
        return trace
    chosen: dict[int, list[RegionWrite]] = {}
    for write in planned:
        chosen.setdefault(write.index, []).append(write)
    rewrite = Rewrite(trace)
    for index, eqn in enumerate(rewrite):
        if writes := chosen.get(index):
            for w in writes:
                rewrite.rename(eqn.results()[w.result], w.target)
            rewrite.keep(writing(eqn, {w.result: w.place for w in writes}))
    rewritten, done = rewrite.finish(), {w.target for w in planned}
    return rewritten.with_(mutations={t: v for t, v in rewritten.mutations.items() if t not in done})


def writing(eqn: Equation, results: dict[int, int]) -> Equation:
    """The region with these results written over these arguments, and not given back."""
    op = eqn.op
    assert isinstance(op, Special) and op.kernel is not None
    kernel = op.kernel.over(results)
    left = tuple(v for k, v in enumerate(eqn.outputs) if k not in results)
    body: Trace = op.body
    rest = tuple(v for k, v in enumerate(body.outputs) if k not in results)
    special = replace(
        op,
        name=f"{op.name}_",
        fn=kernel.run,
        pure=False,
        body=body.with_(outputs=rest),  # type: ignore[attr-defined]
        recipe=None if op.recipe is None else replace(op.recipe, over=tuple(results.items())),
        kernel=kernel,
    )
    return eqn.with_(op=special, outputs=left)
