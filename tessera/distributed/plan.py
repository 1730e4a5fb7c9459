"""Plans: from a word for each axis of a mesh to where weights, gradients, state and inputs lie.

    "zero3"                                        one axis
    {"dp": "zero3", "tp": "tensor"}                a word for each axis
    {"dp": "zero1", "*.up.weight": "f/tp, d"}      and placements by name: of weights, or of what modules give

In: a plan, a mesh, a captured program, its weights by name. Out: a `Layout`. Strategies are placements and nothing
else: what must be gathered, summed or scattered follows from them when the program is partitioned.

    word      weights     gradients   state       does not move
    ddp       whole       whole       whole       activations
    zero1     whole       split       split       activations
    zero2     whole       split       split       activations
    zero3     split       split       split       activations
    hsdp      whole       whole       whole       activations      beside an axis of zero3
    tensor    split, by columns or rows           weights
    sequence  the same, and activations between are split along the sequence
    async-tp  as sequence; products and the exchanges beside them are cut into pieces that overlap
    hf        as a Hugging Face model's own plan says   weights
    ulysses   whole       whole       whole       activations      split along the sequence, in attention along heads
    ring      whole       whole       whole       activations      split along the sequence; in attention keys go round
    experts   experts split, others whole         activations      rows go to the ranks of their experts

A word for a schedule makes an axis a pipeline (`pipe.py`): its ranks hold different weights, and nothing is split over
it.

Gradients under zero1 are split too: the state they go into is, so nobody needs them whole.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from tessera.distributed.context_parallel import Context, context_in
from tessera.distributed.expert_parallel import expert_stacks
from tessera.distributed.hugging_face import WORD as HUGGING_FACE
from tessera.distributed.pipe import Pipe, pipe_in
from tessera.distributed.tensor_parallel import Cuts, columns_and_rows
from tessera.ir.equation import Value
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Mark, Placement, parse_splits
from tessera.ir.trace import Trace
from tessera.ir.types import size_hint, size_key
from tessera.transforms.pipelined.named_schedules import WORDS as SCHEDULES
from tessera.util.errors import OptionError

DATA = ("ddp", "zero1", "zero2", "zero3", "hsdp", "experts")  # axes that split the batch
SEQUENCE = ("sequence", "async-tp")  # what is summed lies split along the sequence
READ = ("tensor", *SEQUENCE)  # what they split is read off the program
MODEL = (*READ, HUGGING_FACE)
CONTEXT = ("ulysses", "ring")
WORDS = (*DATA, *MODEL, *CONTEXT)


@dataclass(frozen=True)
class Plan:
    """A plan that fits a mesh."""

    mesh: Mesh
    words: Mapping[str, str]  # of each axis
    patterns: Mapping[str, str]  # of weights or modules, by name
    pipe: Pipe | None = None

    @classmethod
    def of(cls, plan: str | Mapping[str, object], mesh: Mesh) -> Plan:
        if isinstance(plan, str):
            if len(mesh.names) != 1:
                raise OptionError(f"plan: expected a word for each axis of the mesh {mesh}, got {plan!r} alone")
            plan = {mesh.names[0]: plan}
        pipe = pipe_in(plan, mesh)
        plan = {**plan, **({} if pipe is None else {pipe.axis: pipe.word})}
        words = {key: str(word) for key, word in plan.items() if key.isidentifier() and not set(str(word)) & {"/", ","}}
        for axis, word in words.items():
            if axis not in mesh.names:
                raise OptionError(f"plan: expected axes of the mesh {mesh}, got {axis!r}{_hint(axis, mesh.names)}")
            if word not in WORDS and (pipe is None or axis != pipe.axis):
                every = *WORDS, *SCHEDULES
                told = f"{', '.join(every)}, got {word!r}{_hint(word, every)}"
                raise OptionError(f"plan: expected for {axis} one of {told}")
        if missing := [axis for axis in mesh.names if axis not in words]:
            raise OptionError(f"plan: expected a word for every axis of the mesh {mesh}, got none for {missing[0]}")
        if "hsdp" in words.values() and "zero3" not in words.values():
            raise OptionError("plan: hsdp expects an axis of zero3 beside it, got none")
        if len(both := [axis for axis, word in words.items() if word in CONTEXT]) > 1:
            raise OptionError(f"plan: expected one axis that splits the sequence, got {both[0]} and {both[1]}")
        if len(both := [axis for axis, word in words.items() if word == "experts"]) > 1:
            raise OptionError(f"plan: expected one axis of experts, got {both[0]} and {both[1]}")
        patterns = {key: str(text) for key, text in plan.items() if key not in words}
        return cls(mesh, words, patterns, pipe)

    def axes(self, *words: str) -> tuple[str, ...]:
        """The axes with one of these words. An axis of one rank splits nothing, so it is not among them."""
        return tuple(axis for axis, ranks in self.mesh.axes if self.words[axis] in words and ranks > 1)

    def named(self, weights: Collection[str], modules: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
        """The placements that patterns give to weights, and to what modules give."""
        of_weights: dict[str, str] = {}
        of_modules: dict[str, str] = {}
        for pattern, text in self.patterns.items():
            for names, chosen in ((weights, of_weights), (modules, of_modules)):
                if matched := fnmatch.filter(names, pattern):
                    chosen.update(dict.fromkeys(matched, text))
                    break
            else:
                near = difflib.get_close_matches(pattern.removeprefix("*."), [*weights, *modules], 3, 0.3)
                raise OptionError(f"plan: {pattern!r} matches no weight and no module; near are {_listed(near)}")
        return of_weights, of_modules

    @property
    def stays(self) -> dict[str, str]:
        return {axis: "weights" if word in MODEL else "activations" for axis, word in self.words.items()}

    @property
    def ways(self) -> dict[str, str]:
        """How operands are exchanged along axes."""
        return {axis: self.words[axis] for axis in self.axes("ring", "experts", "async-tp")}

    @property
    def inner(self) -> Mesh:
        """The mesh of one stage: along a pipeline there is one rank."""
        if self.pipe is None:
            return self.mesh
        return Mesh(tuple((axis, 1 if axis == self.pipe.axis else size) for axis, size in self.mesh.axes))


@dataclass(frozen=True)
class Layout:
    """Where everything of a training step lies."""

    plan: Plan
    weights: dict[str, Placement]
    grads: dict[str, Placement]
    states: dict[str, Placement]
    inputs: dict[Value, Placement] = field(default_factory=dict)
    results: dict[Value, Placement] = field(default_factory=dict)
    homes: dict[Value, Placement] = field(default_factory=dict)  # of inputs that a rank cuts further

    def on(self, mesh: Mesh) -> Layout:
        """The same on a mesh that has the axes that split something."""

        def moved(places: Mapping) -> dict:
            return {key: replace(placement, mesh=mesh) for key, placement in places.items()}

        every = map(moved, (self.weights, self.grads, self.states, self.inputs, self.results, self.homes))
        return Layout(self.plan, *every)


def lay_out(
    plan: Plan,
    trace: Trace,
    weights: Mapping[str, Value],
    batch: Sequence[Value],
    held: Mapping[str, Placement] | None = None,
    modules: Collection[str] = (),
    given: Mapping[Value, Placement] | None = None,
) -> Layout:
    """Where the values of a captured program lie. `batch` are inputs whose first dimension is split over data axes;
    `held` is where weights lie already and stay, `given` where inputs do."""
    mesh = plan.mesh
    cuts = {axis: columns_and_rows(trace, set(weights.values()), mesh.size(axis)) for axis in plan.axes(*READ)}
    cuts |= {axis: expert_stacks(trace, weights, axis, mesh.size(axis)) for axis in plan.axes("experts")}
    if held is None:
        placed = {name: _model_split(plan, v, cuts) for name, v in weights.items()} | _by_name(plan, weights, modules)
        held = {name: _split_further(p, plan.axes("zero3")) for name, p in placed.items()}
    split = {name: _split_further(p, plan.axes("zero1", "zero2", "zero3")) for name, p in held.items()}
    inputs = {v: (given or {}).get(v) or rows_of(plan, v) for v in batch if v.ndim}
    rows = next((size_key(v.shape[0]) for v in inputs), None)
    context = context_of(plan, trace, batch)
    results = {
        v: place
        for axis in plan.axes(*SEQUENCE)
        for v in cuts[axis].summed
        if v.ndim > 2 and (place := _along_sequence(plan, v, axis, rows, context)) is not None
    }
    homes = (context.homes(inputs) if context else {}) | _packed(plan, weights, held, cuts)
    return Layout(plan, dict(held), split, split, inputs, results, homes)


def _packed(
    plan: Plan, weights: Mapping[str, Value], held: Mapping[str, Placement], cuts: Mapping[str, Cuts]
) -> dict[Value, Placement]:
    """Where packed weights are read: each of their blocks is cut. To lay a weight so, and its gradient back, is to
    gather it; that is done where it is smaller than the rows that would be gathered otherwise."""
    names, ranks = {v: name for name, v in weights.items()}, prod(map(plan.mesh.size, plan.axes(*DATA, *CONTEXT)))
    homes: dict[Value, Placement] = {}
    for axis, cut in cuts.items():
        for weight, blocks in cut.packed.items():
            rows = prod(map(size_hint, cut.made[weight].shape)) // ranks
            if prod(map(size_hint, weight.shape)) > rows:
                continue
            for v in (weight, *cut.beside.get(weight, ())):
                there = [a for a in held[names[v]].axes if plan.words[a] in MODEL]
                if there == [axis] and held[names[v]].dim_of(axis) == cut.weights[v]:
                    homes[v] = Placement.whole(plan.mesh, v.shape).with_axis(cut.weights[v], axis, Mark(blocks))
    return homes


def context_of(plan: Plan, trace: Trace, batch: Sequence[Value]) -> Context | None:
    """How the plan splits the sequence; None where no axis does."""
    axes = plan.axes(*CONTEXT)
    return context_in(trace, batch, plan.mesh, axes[0], plan.words[axes[0]] == "ring") if axes else None


def lay_out_early(plan: Plan, weights: Mapping[str, Value], modules: Collection[str]) -> dict[str, Placement]:
    """Where weights lie as far as the plan alone tells: what a tensor-parallel axis splits only a program shows."""
    whole = {name: Placement.whole(plan.mesh, v.shape) for name, v in weights.items()}
    placed = whole | _by_name(plan, weights, modules)
    return {name: _split_further(p, plan.axes("zero3")) for name, p in placed.items()}


def demanded(plan: Plan, name: str, v: Value, text: str) -> Placement:
    """The placement that a plan's words give to a value."""
    try:
        _, splits = parse_splits(text)
        placement = Placement(plan.mesh, v.shape, splits) if len(splits) == v.ndim else None
    except OptionError as error:
        raise OptionError(f"plan: {name} is {v.type}, and {text!r} no placement of it: {error}") from error
    if placement is None:
        raise OptionError(f"plan: {name} is {v.type}; expected {v.ndim} dimensions, got {text!r}")
    for dim, axes in enumerate(splits):
        if plan.pipe is not None and plan.pipe.axis in axes:
            raise OptionError(
                f"plan: {text!r} splits {name} over {plan.pipe.axis}, which is a pipeline; expected other axes, since "
                "its ranks hold different weights"
            )
        if not placement.is_even(dim):
            ranks = " x ".join(f"{axis}={plan.mesh.size(axis)}" for axis in axes)
            raise OptionError(
                f"plan: {text!r} splits dimension {dim} of {name}, {v.type}, which {ranks} does not divide"
            )
    return placement


def _model_split(plan: Plan, v: Value, cuts: Mapping[str, Cuts]) -> Placement:
    placement = Placement.whole(plan.mesh, v.shape)
    for axis, cut in cuts.items():
        dim = cut.weights.get(v)
        if dim is not None and _divides(placement.local(dim), plan.mesh.size(axis)):
            placement = placement.with_split(dim, (*placement.splits[dim], axis))
    return placement


def _divides(size: object, ranks: int) -> bool:
    return isinstance(size, int) and size % ranks == 0


def _split_further(placement: Placement, axes: Sequence[str]) -> Placement:
    """Split over more axes, each along the first dimension that it divides, innermost; a weight without one stays whole
    along it."""
    for axis in axes:
        if axis in placement.axes or placement.mesh.size(axis) == 1:
            continue
        ranks, dims = placement.mesh.size(axis), range(len(placement.shape))
        dim = next((d for d in dims if placement.local(d) and _divides(placement.local(d), ranks)), None)
        if dim is not None:
            placement = placement.with_split(dim, (*placement.splits[dim], axis))
    return placement


def rows_of(plan: Plan, v: Value) -> Placement:
    axes = plan.axes(*DATA)
    placement = Placement.whole(plan.mesh, v.shape).with_split(0, axes)
    if not placement.is_even(0):
        ranks = " x ".join(f"{axis}={plan.mesh.size(axis)}" for axis in axes)
        raise OptionError(f"{v.name}: expected a batch that {ranks} divides, got {v.shape[0]} rows")
    return placement


def _along_sequence(plan: Plan, v: Value, axis: str, rows: object, context: Context | None) -> Placement | None:
    """None where the sequence cannot be cut so."""
    placement = Placement.whole(plan.mesh, v.shape)
    if size_key(v.shape[0]) == rows:
        placement = placement.with_split(0, plan.axes(*DATA))
    if context is not None and size_key(v.shape[1]) == size_key(context.length):
        placement = placement.with_axis(1, context.axis, context.mark)
    return placement.with_axis(1, axis) if placement.cuts_further(1, axis) else None


def _by_name(plan: Plan, weights: Mapping[str, Value], modules: Collection[str]) -> dict[str, Placement]:
    """Placements of weights that the plan names."""
    of_weights, _ = plan.named(weights, modules)
    return {name: demanded(plan, name, weights[name], text) for name, text in of_weights.items()}


def _hint(word: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
