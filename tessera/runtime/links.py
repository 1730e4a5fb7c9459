"""Which results of a program are made of which, and what flows between them.

In: a captured program. Out: of each result, those that it is made of, and which of them are views made outside
(`runtime/linked.py` joins them); the program of what flows from some to others. Both ask the program as the user wrote
it: cleaned, a value may be computed once that was computed twice, or past another that it was made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tessera.frontends.captured import Captured
from tessera.ir.aliased import Aliased
from tessera.ir.equation import NO_GRAD, Value, substitute
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops.op import stops
from tessera.passes.clean.inline import inline
from tessera.torch_internals.fake import FakeTensorMode
from tessera.torch_internals.operators import op_name
from tessera.transforms.vjp import Joint, vjp


@dataclass(frozen=True)
class Made:
    """Of what results are made, and the views among that; as in `Bridge`."""

    links: tuple[tuple[int, ...], ...] = ()
    views: tuple[Aliased, ...] = ()
    viewed: tuple[int, ...] = ()
    written: tuple[tuple[int, int], ...] = ()


def computed(captured: Captured) -> list[Value]:
    """The outputs that are not made outside, of inputs or of other outputs, each once."""
    outputs = (o for i, o in enumerate(captured.trace.outputs) if i not in captured.aliased)
    return list(dict.fromkeys(o for o in outputs if isinstance(o, Value)))


def links_of(
    captured: Captured,
    outputs: Sequence[int],
    count: int,
    pulled: set[int],
    written: Sequence[tuple[int, int]],
    plain: bool,
) -> Made:
    """`outputs`: of each output that is computed, its place among so many results. `pulled`: those with a gradient.
    `written`: inputs that get a result outside. `plain`: results are made of other results alone, not of views or of
    what inputs got."""
    every = dict(zip(computed(captured), outputs, strict=False))
    places = {v: place for v, place in every.items() if place in pulled}
    apart = pulled.difference(outputs)
    got = {} if plain else {new_contents(captured, i): place for i, place in written if place in apart}
    places |= got
    shown = [] if plain else _views(captured, places)
    links = _Links(captured.trace, places, shown, count)
    if shown:
        shown = links.asked(shown)
        links = _Links(captured.trace, places, shown, count)
    if not any(links.made[:count]):
        return Made()
    asked = {place for one in links.made for place in one}
    return Made(
        tuple(tuple(sorted(one)) for one in links.made),
        tuple(view.made(every, links.number) for view in shown),
        tuple(view.output for view in shown),
        tuple((i, place) for i, place in written if place in got.values() and place in asked),
    )


def new_contents(captured: Captured, i: int) -> Value:
    """What the program writes to an input."""
    return captured.trace.mutations[captured.trace.inputs[i]]


@dataclass(frozen=True)
class _View:
    """An output that is a view of a result, or of an argument."""

    value: Value
    output: int
    alias: Aliased
    source: Value
    above: Value | None  # a view before it that it is a view of

    @property
    def upon(self) -> Value:
        return self.source if self.above is None else self.above

    def made(self, places: Mapping[Value, int], number: Mapping[Value, int]) -> Aliased:
        """With places of results for values, and beginning where the view above ends."""
        begin = self.alias.shared[1] if self.above is not None and self.alias.shared is not None else 0
        part = self.alias.part(begin, len(self.alias.steps)).with_places(places)
        if self.upon not in number:
            return part
        return replace(part, source=number[self.upon], of_output=True)


def _views(captured: Captured, places: Mapping[Value, int]) -> list[_View]:
    trace, views = captured.trace, dict[Value, _View]()
    given = {v for v, wanted in zip(trace.inputs, captured.requires_grad, strict=False) if wanted}
    for i, alias in sorted(captured.aliased.items(), key=lambda item: (len(item[1].steps), item[0])):
        v, ops = trace.outputs[i], {op_name(op) for op, *_ in alias.steps}
        source = (trace.outputs if alias.of_output else trace.inputs)[alias.source]
        if alias.of_output:
            known = source in places and alias.source not in captured.placed
        elif source in trace.mutations:  # of what it got
            source = trace.mutations[source]  # type: ignore[index]
            known = source in places and "as_strided" not in ops
        else:
            known = source in given and "as_strided" not in ops  # of memory that begins elsewhere
        follows = ops and "detach" not in ops and not alias.steps[-1][-1]  # the last one, made under no_grad: a leaf
        if known and follows and isinstance(v, Value) and v not in views:
            above = None if alias.shared is None else trace.outputs[alias.shared[0]]
            views[v] = _View(v, i, alias, source, above if above in views else None)  # type: ignore[arg-type]
    return list(views.values())


class _Links:
    """Of what each result and view is made, if by way of nothing else that is given out."""

    def __init__(self, trace: Trace, places: Mapping[Value, int], views: Sequence[_View], count: int) -> None:
        self.number = {**places, **{view.value: count + k for k, view in enumerate(views)}}
        self.source = {view.value: self.number.get(view.upon) for view in views}  # None: an argument
        self.root = {count + k: places.get(view.source) for k, view in enumerate(views)}
        self.made: list[set[int]] = [set() for _ in range(count + len(views))]
        self.behind: dict[int, set[int]] = {}  # of a view that was written, what was written
        made_of: dict[Value, set[int]] = {}
        done: set[int] = set()
        for e in trace.equations:
            through = NO_GRAD not in e.tags and not stops(e)
            behind = set[int]().union(*(made_of.get(v, ()) for v in e.inputs())) if through else set[int]()
            for v in e.results():
                place = self.number.get(v)
                if place is not None and (v in places or through):
                    if place not in done:  # an equal value that comes later could close a circle
                        self.add(v, place, behind)
                    done.add(place)
                    made_of[v] = {place}
                elif behind and isinstance(v.type, TensorType) and v.type.is_differentiable:
                    made_of[v] = behind

    def add(self, v: Value, place: int, behind: set[int]) -> None:
        if v in self.source:
            self.behind[place], self.made[place] = behind, {self.source[v]} - {None}  # type: ignore[assignment]
            return
        # Written through a view, a result is made of what was written: it is the view that is made of the result.
        while own := {k for k in behind if self.root.get(k) == place}:
            behind = (behind - own).union(*(self.behind[k] for k in own))
        self.made[place] = behind

    def asked(self, views: Sequence[_View]) -> list[_View]:
        """The views that results are made of, and what those are views of."""
        results = len(self.made) - len(views)
        asked = {k for one in self.made[:results] for k in one}
        for view in reversed(views):
            if self.number[view.value] in asked:
                asked |= self.made[self.number[view.value]]
        return [view for view in views if self.number[view.value] in asked]


def as_written(
    captured: Captured,
    places: Sequence[int],
    viewed: Sequence[int],
    count: int,
    written: Sequence[tuple[int, int]],
) -> tuple[Trace, dict[int, list[Value]]]:
    """The program before anything was done to it, and the values at each place: of results, and of views behind."""
    shown = [captured.trace.outputs[i] for i in viewed]
    values = computed(captured)
    of: dict[int, list[Value]] = {}
    for place, v in zip(places, values, strict=False):
        of.setdefault(place, []).append(v)
    of |= {count + k: [v] for k, v in enumerate(shown) if isinstance(v, Value)}
    got = {place: new_contents(captured, i) for i, place in written}
    of |= {place: [v] for place, v in got.items()}
    return inline(captured.trace.with_(outputs=(*values, *shown, *got.values()))), of


def between(
    core: Trace,
    wrt: list[Value],
    outer: list[Value],
    inner: list[list[Value]],
    mode: FakeTensorMode | None,
    again: bool,
) -> Joint:
    """The joint program of the core and the gradients of these results by others that they are made of. Some may be
    several values, which are equal.

    The inner ones are leaves while it is differentiated: what they are made of is another matter. It is differentiated
    by `wrt` as well, so that the forward in it is the one that ran, which knows what it drew at random.
    """
    leaves = [Value(f"{same[0].name}_leaf", same[0].type) for same in inner]
    reads = {v: leaf for same, leaf in zip(inner, leaves, strict=True) for v in same}
    cut = core.with_(
        inputs=(*core.inputs, *leaves),
        equations=tuple(e.substitute(reads) for e in core.equations),
        outputs=(*outer, *(same[0] for same in inner)),
        mutations={},
    )
    joint = vjp(cut, [*wrt, *leaves], mode, pull=outer, again=again)
    results, grads = joint.trace.outputs[: len(cut.outputs)], joint.trace.outputs[len(cut.outputs) + len(wrt) :]
    back = dict(zip(leaves, results[len(outer) :], strict=True))
    trace = joint.trace.with_(
        inputs=tuple(v for v in joint.trace.inputs if v not in back),
        equations=tuple(e.substitute(back) for e in joint.trace.equations),
        outputs=tuple(substitute([*results[: len(outer)], *grads], back)),
    )
    return replace(joint, trace=trace, wrt=tuple(leaves))
