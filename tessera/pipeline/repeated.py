"""A deep program compiled as a short one.

In: a captured program with many equal layers. Out: `Compiled`: its final programs and how they line up with their
caller, made of those of a program with few layers (`shorten.py`, `stretch.py`), for each run of layers in turn. None
where there is nothing to take out, or where what was compiled does not repeat itself as the layers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tessera.frontends.captured import Captured
from tessera.ir.aliased import Aliased
from tessera.ir.builder import Builder
from tessera.ir.equation import Value
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.pipeline.executable import Ends
from tessera.pipeline.shorten import Chain, Shortened, shortened
from tessera.pipeline.stretch import NotRepeated, Stretched
from tessera.runtime.autograd import Bridge
from tessera.runtime.call import Layout
from tessera.runtime.plan import edges
from tessera.util.log import log

Kept = tuple[Trace, tuple[Value, ...]]


@dataclass(frozen=True)
class Compiled:
    """Final programs: one, or a forward and a backward."""

    programs: tuple[Trace, ...]
    ends: Ends
    kept: Kept | None = None  # the forward's equations before they were claimed, and what it saves


def compiled(name: str, captured: Captured, compile_: Callable[[Captured], Compiled]) -> Compiled | None:
    """`compile_` takes a program through its pipeline."""
    levels: list[Shortened] = []
    while (level := shortened(levels[-1].short if levels else captured)) is not None:
        levels.append(level)
    if not levels:
        return None
    programs = compile_(levels[-1].short)
    try:
        for level in reversed(levels):
            programs = _Level(programs, level).stretched()
    except NotRepeated as reason:
        log(1, f"{name}: every layer is compiled: {reason}")
        return None
    return programs


class _Level:
    """One run of layers, made long again."""

    def __init__(self, programs: Compiled, level: Shortened) -> None:
        self.programs, self.chains, self.gone = programs, level.chains, level.gone
        self.short, self.whole = level.short.trace.inputs, level.whole.trace.inputs
        self.numbers = {v: i for i, v in enumerate(self.whole)}
        if programs.programs[0].inputs != self.short:
            raise NotRepeated("the program does not take the inputs that were captured")
        self.forward = Stretched(programs.programs[0], self.chains, self.gone, 1)

    def stretched(self) -> Compiled:
        bridge, layout = self.programs.ends.bridge, self.layout(self.programs.ends.layout)
        written = self.inputs(self.programs.ends.written)
        if bridge is None:
            trace = self.program(self.forward, self.programs.programs[0].outputs)
            return Compiled((trace,), Ends(layout, None, written))
        short = self.programs.programs[0].outputs
        results, saved = short[: bridge.results], short[bridge.results :]
        series = self.saved_series(saved)
        forward = self.program(self.forward, (*results, *self.save(self.forward, saved, series)))
        backward, gradients = self.backward(bridge, len(saved), series)
        ends = Ends(layout, self.bridge(bridge, forward.outputs[bridge.results :], gradients), written)
        return Compiled((forward, backward), ends, self.kept(series))

    def program(self, stretched: Stretched, outputs: Iterable[object]) -> Trace:
        return stretched.trace.with_(
            inputs=self.whole,
            equations=stretched.equations,
            outputs=tuple(outputs),
            mutations=self.mutations(stretched),
        )

    def mutations(self, stretched: Stretched) -> dict[Value, Value]:
        short = stretched.trace.mutations
        whole: dict[Value, Value] = {target: v for target, v in short.items() if target not in stretched.where}
        for chain in self.chains:
            values = [short.get(target) for target in chain.left(self.gone)]
            pairs = zip(chain.values, stretched.spread(values, chain.before), strict=True)
            whole.update((target, v) for target, v in pairs if isinstance(v, Value))
        return whole

    # --- what forward saves ---

    def saved_series(self, saved: Sequence[object]) -> list[tuple[list[int], int]]:
        """Places among what is saved that hold the same of each layer, and how many stand before those that come in."""
        by_key: dict[tuple, list[tuple[int, int]]] = {}
        for place, v in enumerate(saved):
            if (series := self.forward.series(v)) is not None:
                by_key.setdefault(series[0], []).append((series[1], place))
        listed = []
        for key, members in by_key.items():
            cut = self.forward.before(key)
            turns = sorted(members)
            before = sum(turn < cut for turn, _ in turns)
            if {cut - 1, cut} <= {turn for turn, _ in turns}:
                listed.append(([place for _, place in turns], before))
            elif {cut - 1, cut} & {turn for turn, _ in turns}:
                raise NotRepeated("forward does not save of each layer the same")
        return listed

    def save(self, stretched: Stretched, saved: Sequence[object], series: list[tuple[list[int], int]]) -> list[object]:
        """What is saved of all layers: of those that the short program has in the same places."""
        whole = [self.kept_input(v) for v in saved]
        for places, before in series:
            values = stretched.spread([saved[place] for place in places], before)
            ends = (*values[:before], *values[before + self.gone :])
            for place, v in zip(places, ends, strict=True):
                whole[place] = v
            whole += values[before : before + self.gone]
        return whole

    def kept_input(self, v: object) -> object:
        """An input that is saved of some layers at the ends alone."""
        if not isinstance(v, Value) or v not in self.forward.where:
            return v
        role, i = self.forward.where[v]
        chain = self.chains[role]
        return chain.values[i if i < chain.before else i + self.gone]

    def kept(self, series: list[tuple[list[int], int]]) -> Kept | None:
        if self.programs.kept is None:
            return None
        trace, saved = self.programs.kept
        stretched = Stretched(trace, self.chains, self.gone, 1)
        whole = self.save(stretched, saved, series)
        outputs = trace.outputs[: len(trace.outputs) - len(saved)]
        return self.program(stretched, (*outputs, *whole)), tuple(whole)  # type: ignore[return-value]

    # --- backward ---

    def backward(
        self, bridge: Bridge, count: int, series: list[tuple[list[int], int]]
    ) -> tuple[Trace, dict[Value, object]]:
        """The backward program, and the gradients of the whole program's inputs."""
        trace = self.programs.programs[1]
        saved, cotangents = trace.inputs[:count], trace.inputs[count:]
        builder = Builder.over(trace)
        chains, added = [], []
        for places, before in series:
            like = saved[places[before - 1]]
            more = [builder.value(like.name, like.type) for _ in range(self.gone)]
            held = [saved[place] for place in places]
            chains.append(Chain((*held[:before], *more, *held[before:]), before))
            added += more
        stretched = Stretched(trace, chains, self.gone, -1)
        given = dict(zip((self.short[i] for i in bridge.wrt), trace.outputs, strict=True))
        gradients: dict[Value, object] = {v: g for v, g in given.items() if v not in self.forward.where}
        for chain in self.chains:
            left = chain.left(self.gone)
            if left[0] in given:
                gradients |= zip(chain.values, stretched.spread([given[v] for v in left], chain.before), strict=True)
        ordered = {v: gradients[v] for v in self.whole if v in gradients}
        inputs = (*saved, *added, *cotangents)
        return trace.with_(inputs=inputs, equations=stretched.equations, outputs=tuple(ordered.values())), ordered

    # --- how programs line up with their caller ---

    def inputs(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Inputs of the whole program, of those of the short one."""
        marked = {self.short[i] for i in numbers}
        whole = [v for v in marked if v not in self.forward.where]
        for chain in self.chains:
            low, high = self.around(chain)
            if (low in marked) != (high in marked):
                raise NotRepeated("layers line up with their caller in different ways")
            whole += [v for v, of in zip(chain.values, self.like(chain), strict=True) if of in marked]
        return tuple(sorted(self.numbers[v] for v in whole))

    def around(self, chain: Chain) -> tuple[Value, Value]:
        """What stands before and behind those that come in."""
        left = chain.left(self.gone)
        return left[chain.before - 1], left[chain.before]

    def like(self, chain: Chain) -> list[Value]:
        """Of each layer's input, the one of the short program that stands for it."""
        left = chain.left(self.gone)
        return [*left[: chain.before], *[left[chain.before]] * self.gone, *left[chain.before :]]

    def layout(self, short: Layout) -> Layout:
        if short.placed or any(self.short[i] in self.forward.where for i, _ in short.write_back):
            raise NotRepeated("layers write what carries gradients")
        return replace(
            short,
            outputs=tuple(self.part(p) for p in short.outputs),
            write_back=tuple((self.numbers[self.short[i]], place) for i, place in short.write_back),
            written=self.inputs(short.written),
            counted=self.inputs(short.counted),
            viewed=self.inputs(short.viewed),
        )

    def part(self, part: object) -> object:
        if isinstance(part, Aliased) and not part.of_output:
            return replace(part, source=self.numbers[self.short[part.source]])
        return part

    def bridge(self, short: Bridge, saved: Sequence[object], gradients: dict[Value, object]) -> Bridge:
        if short.shares:
            raise NotRepeated("what is saved lies in the memory of results")
        if any(self.short[i] in self.forward.where for i, _ in short.written):
            raise NotRepeated("layers write what carries gradients")
        tensors = [isinstance(v, Value) and isinstance(v.type, TensorType) for v in saved]
        stands_for = {v: of for chain in self.chains for v, of in zip(chain.values, self.like(chain), strict=True)}
        reached = dict(zip((self.short[i] for i in short.wrt), short.reached, strict=True))
        if any(low in reached and reached[low] != reached[high] for low, high in map(self.around, self.chains)):
            raise NotRepeated("gradients of layers are made of different cotangents")
        cut = tuple(self.numbers[v] for v, g in gradients.items() if g is None)
        return replace(
            short,
            wrt=tuple(self.numbers[v] for v in gradients),
            inputs=len(self.whole),
            tensors=tuple(i for i, tensor in enumerate(tensors) if tensor),
            numbers=tuple(i for i, tensor in enumerate(tensors) if not tensor),
            own=tuple(self.numbers.get(v, -1) for v in saved),  # type: ignore[call-overload]
            unsaved=self.inputs(short.unsaved),
            lent=self.inputs(short.lent),
            reached=tuple(reached[stands_for.get(v, v)] for v in gradients),
            cut=cut if len(cut) < len(gradients) else (),
            edges=edges(self.whole),
            views=tuple(self.part(view) for view in short.views),  # type: ignore[misc]
            written=tuple((self.numbers[self.short[i]], place) for i, place in short.written),
        )
