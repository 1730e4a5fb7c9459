"""The partitioner: from one global program to the program of one rank.

In: a Trace over whole values (forward, backward and update together), a mesh, and where some of its values lie, inputs
and others. Out: a Trace with local sizes in which ranks exchange values by collectives; every value's type says where
it lies. The same program serves all ranks. Its outputs hold no summands, what it writes lies as it lay before, and run
on all ranks it computes what the global program computes.

Equations are taken in order. Each is cut in the way that moves the fewest bytes (`choose`), its operands are brought
where that wants them (`values`, `paths`), and copies that were made for one equation serve the next. An operator whose
rule forbids what would be cheapest is taken apart, where that is declared; one without a rule is given whole values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tessera.ir.builder import Builder
from tessera.ir.call import in_place
from tessera.ir.equation import Equation, Value, map_values
from tessera.ir.mesh import Mesh
from tessera.ir.mode import mode_of
from tessera.ir.placement import PLAIN, Placement, chunk
from tessera.ir.replay import sweep
from tessera.ir.schema import draws, is_view
from tessera.ir.signature import lasting
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, Type
from tessera.ops.factors.arithmetic import arithmetic
from tessera.ops.factors.lookup import factors_of
from tessera.ops.factors.rule import Factors, apart_of, tensors, uncut
from tessera.ops.factors.tried import tried
from tessera.transforms.shard.alike import alike, elementwise
from tessera.transforms.shard.choose import RING, Choice, Question, choose
from tessera.transforms.shard.homes import CAST, Homes
from tessera.transforms.shard.instead import back_again
from tessera.transforms.shard.local import local
from tessera.transforms.shard.makers import Makers
from tessera.transforms.shard.notes import Note, noted
from tessera.transforms.shard.remembered import RULES, choices_on
from tessera.transforms.shard.values import HEAVY, Values, local_type, placement_of
from tessera.util.errors import InputError, RuleError


@dataclass(frozen=True)
class Sharded:
    trace: Trace
    notes: tuple[Note, ...]


def shard(
    trace: Trace,
    mesh: Mesh,
    placements: Mapping[Value, Placement],
    weights: Collection[Value] = (),
    stays: Mapping[str, str] | None = None,
    wide: bool = False,
    homes: Mapping[Value, Placement] | None = None,
    ways: Mapping[str, str] | None = None,
) -> Sharded:
    """The program of one rank. `placements` pins values of the trace, inputs or not; other inputs are whole on every
    rank. `stays` says for an axis what is not moved along it if there is another way: "weights", which are the inputs
    named so and what is computed from them alone, or "activations". With `wide`, pinned summands of 16 bits are added
    in float32. `homes` is where inputs go at once, of which the placed one stays a copy, and weights when they are
    read; `ways` says of an axis that operands may be exchanged along it: keys and values in a "ring", rows to their
    "experts"."""
    trace = in_place(trace)
    for v, placement in (*placements.items(), *(homes or {}).items()):
        if placement.mesh != mesh:
            raise InputError(f"{v.name}: expected a placement on the mesh {mesh}, got one on {placement.mesh}")
        if tuple(map(str, placement.shape)) != tuple(map(str, v.shape)):
            raise InputError(f"{v.name}: expected a placement of {v.type}, got {placement}")
    return _Partitioner(trace, mesh, placements, weights, stays or {}, wide, homes or {}, ways or {}).run()


AHEAD = 4  # equations that are looked through to see how a value will lie


class _Partitioner:
    def __init__(
        self,
        trace: Trace,
        mesh: Mesh,
        pins: Mapping[Value, Placement],
        weights: Collection[Value],
        stays: Mapping[str, str],
        wide: bool,
        homes: Mapping[Value, Placement],
        ways: Mapping[str, str],
    ) -> None:
        self.trace, self.mesh, self.pins, self.weights = trace, mesh, pins, weights
        self.homes, self.ways = homes, ways
        self.builder = Builder(trace.name, mode_of(trace))
        self.values = Values(self.builder, mesh, stays, pins if wide else ())
        self.makers, self.weights_at = Makers(self.values), Homes(self.values, homes, weights)
        self.values.make = self.makers.made
        self.held, self.kinds = self.values.held, self.values.kinds
        self.uses: dict[Value, int] = {}
        self.users, self.makers_of = trace.users(), trace.makers()
        self.notes: list[Note] = []
        self.choices = choices_on(mesh, stays, ways)  # equal equations whose operands lie alike are cut alike

    def run(self) -> Sharded:
        trace = self.trace
        self.count(trace.equations)
        for v in trace.inputs:
            self.input(v)
        for v, tensor in trace.constants.items():
            self.kinds[v] = ""
            self.held[v] = [self.builder.constant(v.name, tensor, self.whole_type(v))]
        self.symbols()
        with self.builder:
            for v, home in self.homes.items():
                if v not in self.weights_at.later:
                    given = self.held[v][0]
                    self.held[v] = [self.values.bring(v, home), given]
            for eqn in trace.equations:
                self.equation(eqn)
            outputs = map_values(trace.outputs, self.output)
            mutations = {self.held[t][0]: self.values.bring(v, self.place(t)) for t, v in trace.mutations.items()}
        program = sweep(self.builder.finish(outputs, mutations))  # type: ignore[arg-type]
        return Sharded(program, tuple(self.notes))

    def count(self, equations: Collection[Equation]) -> None:
        """How often values are read."""
        for eqn in equations:
            for v in eqn.inputs():
                self.uses[v] = self.uses.get(v, 0) + 1

    # --- where values enter and leave ---

    def input(self, v: Value) -> None:
        self.kinds[v] = "weights" if v in self.weights else "activations"
        if not isinstance(v.type, TensorType):
            self.held[v] = [self.builder.input(v.name, v.type)]
            return
        placement = self.pins.get(v) or self.values.whole(v)
        if placement.parts:
            raise InputError(f"{v.name}: expected an input that holds no summands, got {placement}")
        self.held[v] = [self.builder.input(v.name, local_type(v.type, placement))]

    def symbols(self) -> None:
        for symbol, (v, dim) in self.trace.symbols.items():
            if v not in self.held:
                continue
            here = self.held[v][0]
            if dim is not None and placement_of(here).splits[dim] and str(here.shape[dim]) != symbol:
                raise InputError(f"{v.name}: the size {symbol} of dimension {dim}, which is split, must be a number")
            self.builder.symbols[symbol] = (here, dim)

    def output(self, v: Value) -> Value:
        if not isinstance(v.type, TensorType):
            return self.held[v][0]
        return self.values.bring(v, self.pins.get(v) or self.place(v).without_parts())

    def place(self, v: Value) -> Placement:
        return self.values.place(v)

    # --- equations ---

    def equation(self, eqn: Equation) -> None:
        if self.weights_at.later or self.weights_at.there:
            self.weights_at.settle(eqn)
        kinds = {self.kinds[v] for v in eqn.inputs()}
        kind = next((k for k in ("activations", "weights") if k in kinds), "")
        self.kinds.update(dict.fromkeys(eqn.results(), kind))
        if kind and (place := alike(eqn, self.values, self.makers)) is not None and eqn.out not in self.pins:
            self.held[eqn.out] = [elementwise(eqn, self.values, place)]
            return
        rule = self.rule(eqn) if eqn.results() else None
        numbers = not all(isinstance(v.type, TensorType) for v in eqn.results())
        if not eqn.results() or (numbers and (rule is None or rule.local is None)):
            self.as_it_is(eqn)
            return
        if (rule is None or self.forbids(eqn, rule)) and self.decompose(eqn, rule is None):
            return
        if rule is None and any(not self.place(v).is_whole for v in tensors(eqn)):
            rule = tried(eqn)
        self.cut(eqn, rule or uncut(eqn), rule is None or self.forbids(eqn, rule))

    def rule(self, eqn: Equation) -> Factors | None:
        number = lasting(eqn)
        if number is None:
            return factors_of(eqn)
        if number not in RULES:
            RULES[number] = factors_of(eqn)
        return RULES[number]

    def forbids(self, eqn: Equation, rule: Factors) -> bool:
        """Some operand is split along a dimension that the operator wants whole."""
        if not rule.whole:
            return False
        for v, dims in zip(tensors(eqn), rule.operands, strict=True):
            for dim, axes in enumerate(self.place(v).splits):
                cuts = [(axis, rule.cut_by(dims[dim], self.place(v).mark(axis))) for axis in axes]
                if any(cut and cut[0] in rule.whole and not self.may(rule, axis) for axis, cut in cuts):
                    return True
        return False

    def may(self, rule: Factors, axis: str) -> bool:
        """There is a way for an axis that splits what must be whole: round a ring, or along something else instead."""
        ranks = self.mesh.size(axis)
        fits = any(not rule.shares(f) or chunk(rule.sizes[f], ranks) * ranks == rule.sizes[f] for f in rule.instead)
        return fits or (self.ways.get(axis) == RING and bool(rule.around))

    def as_it_is(self, eqn: Equation) -> None:
        """Numbers, checks, effects: every rank does the same on whole values."""

        def whole(v: Value) -> Value:
            return self.values.bring(v, self.values.whole(v)) if isinstance(v.type, TensorType) else self.held[v][0]

        with self.builder.at(eqn):
            args, kwargs = map_values((eqn.args, eqn.kwargs), whole)  # type: ignore[misc]
        outputs = [None if v is None else self.builder.value(v.name, self.whole_type(v)) for v in eqn.outputs]
        self.builder.equations.append(eqn.with_(args=args, kwargs=kwargs, outputs=tuple(outputs)))
        for v, here in zip(eqn.outputs, outputs, strict=True):
            if v is not None and here is not None:
                self.define(v, here)

    def whole_type(self, v: Value) -> Type:
        return v.type.placed(self.values.whole(v)) if isinstance(v.type, TensorType) else v.type

    def decompose(self, eqn: Equation, ruleless: bool) -> bool:
        """Take an equation apart and go on with what it is made of: as declared, or one without a rule into
        arithmetic. False where neither is known, or where all its operands are whole anyway."""
        if all(self.place(v).is_whole for v in tensors(eqn)):
            return False
        declared = apart_of(eqn)
        builder = Builder("apart", self.builder.mode)
        builder.reserve(self.trace.values())
        with builder, builder.at(eqn):
            parts = None if declared is None else declared(eqn)
            if parts is None and ruleless:
                parts = arithmetic(eqn, builder)
        if parts is None:
            return False
        results: list[Value | None] = list(parts) if isinstance(parts, (list, tuple)) else [parts]  # type: ignore[list-item]
        self.count(builder.equations)
        pairs = [(v, outer) for v, outer in zip(results, eqn.outputs, strict=True) if outer is not None]
        for v, outer in pairs:
            if v is None or v.dtype != outer.dtype or tuple(map(str, v.shape)) != tuple(map(str, outer.shape)):
                raise RuleError(f"{eqn.op} taken apart gives {v}, expected {outer}")
            self.uses[v] = self.uses.get(v, 0) + self.uses.get(outer, 0)
        for part in builder.equations:
            self.equation(part)
        for v, outer in pairs:
            assert v is not None
            self.define(outer, *self.held[v])
            if v in self.makers.of:
                self.makers.of[outer] = self.makers.of[v]
        return True

    def cut(self, eqn: Equation, rule: Factors, forbidden: bool) -> None:
        operands, outputs = tensors(eqn), eqn.outputs
        results = [v if dims is not None else None for v, dims in zip(outputs, rule.results, strict=True)]
        for v in operands:
            if (home := self.home(v)) is not None:
                self.held[v] = [self.values.bring(v, home)]
        choice = self.choice(eqn, rule, operands, results)
        if forbidden:
            self.notes += noted(self.values, eqn, choice)
        drawn = draws(eqn.op, eqn.args, eqn.kwargs)
        back = back_again(eqn, rule, choice, self.place) if rule.instead else {}
        for v, here in zip(outputs, local(self.values, eqn, rule, choice), strict=True):
            if v is not None and here is not None:
                self.define(v, self.values.agreed(here) if drawn else here)
                if v in back and v not in self.pins:
                    self.held[v] = [self.values.bring(v, back[v]), here]
        if is_view(eqn.op) and len(operands) == len(results) == 1 and results[0] not in self.pins:
            self.view_copies(eqn, rule, operands[0], eqn.out)
        made = not drawn and (all(self.kinds[v] == "" for v in operands) or self.makers.spreads(eqn, rule))
        if (rule.cheap or made) and len(results) == 1 and results[0] is not None:
            self.makers.of[results[0]] = eqn, rule

    def choice(self, eqn: Equation, rule: Factors, operands: list[Value], results: list[Value | None]) -> Choice:
        """How an equation is cut; as one before it was, if that is the same and its operands lie as they did there."""
        pinned = tuple(None if v is None else self.pins.get(v) for v in results)
        held = tuple(tuple(placement_of(copy) for copy in self.weights_at.copies(eqn, v)) for v in operands)
        may_pass = tuple(self.uses.get(v, 0) == 1 and len(self.held[v]) == 1 for v in operands)
        number = None if any(v in self.makers.of for v in operands) else lasting(eqn)
        key = number, held, pinned, may_pass, tuple(self.kinds[v] for v in operands)
        if number is None:
            return self.asked(rule, operands, results, held, pinned, may_pass)
        if key not in self.choices:
            self.choices[key] = self.asked(rule, operands, results, held, pinned, may_pass)
        return self.choices[key]

    def asked(
        self,
        rule: Factors,
        operands: list[Value],
        results: list[Value | None],
        held: Sequence[Sequence[Placement]],
        pinned: Sequence[Placement | None],
        may_pass: Sequence[bool],
    ) -> Choice:
        def move(i: int, to: Placement) -> float:
            v = operands[i]
            there = any(copy.tensor.placement == to for copy in self.held[v]) or self.makers.way(v, to) is not None
            return 0.0 if there else self.values.nearest(v, to)[0]

        def settle(i: int, at: Placement) -> float:
            v, pin = results[i], pinned[i]
            assert v is not None and pin is not None
            return self.values.moving(v, at, pin)

        return choose(Question(self.mesh, rule, operands, results, held, pinned, may_pass, move, settle, self.ways))

    def view_copies(self, eqn: Equation, rule: Factors, x: Value, out: Value) -> None:
        """A view costs nothing: where there are several copies of a value, there are as many of its view."""
        if len(self.held[x]) == 1:
            return
        for place in [placement_of(copy) for copy in self.held[x]]:
            if place.parts:
                continue
            choice = self.view_of(eqn, rule, place)
            there = any(choice.results[0] == placement_of(view) for view in self.held[out])
            if choice.operands[0] == place and not there:
                (view,) = local(self.values, eqn, rule, choice)
                assert view is not None
                self.held[out].append(view)

    def view_of(self, eqn: Equation, rule: Factors, place: Placement) -> Choice:
        """How a view is cut if its operand stays where it is."""
        key = lasting(eqn), place
        if key in self.choices:
            return self.choices[key]
        costs = lambda _, to: 0.0 if to == place else HEAVY  # noqa: E731
        choice = choose(
            Question(self.mesh, rule, tensors(eqn), [eqn.out], [[place]], [None], [False], costs, costs)
        )  # fmt: skip
        if key[0] is not None:
            self.choices[key] = choice
        return choice

    def home(self, v: Value) -> Placement | None:
        """Where summands that several equations read are best put together: one of those equations has an operand that
        is split, so ranks need their own part alone. To scatter sums costs half of what sharing them does."""
        place = self.place(v)
        if not place.parts or not self.shared(v):
            return None
        for axis, how in place.parts:
            dim = self.met(v, axis) if how == "sum" else None
            if dim is None:
                continue
            if all(mark == PLAIN for _, mark in place.entries(dim)) or place.cuts_further(dim, axis):
                moved = place.without_part(axis).with_axis(dim, axis)
                place = moved if moved.is_even(dim) else place
        return place if place != self.place(v) else None

    def shared(self, v: Value) -> bool:
        """Several equations read a value, or one that gives it another dtype, which more bytes may have."""
        readers = self.users.get(v, ())
        return self.uses.get(v, 0) > 1 or (len(readers) == 1 and readers[0].opname == CAST)

    def met(self, v: Value, axis: str) -> int | None:
        """The dimension of a value that some reader's other operand has split over an axis."""
        for eqn in self.users.get(v, ()):
            if eqn.opname == CAST:
                if (dim := self.met(eqn.out, axis)) is not None:
                    return dim
                continue
            rule = self.rule(eqn)
            if rule is None:
                continue
            sides = list(zip(tensors(eqn), rule.operands, strict=True))
            own = next(dims for x, dims in sides if x is v)
            for x, dims in sides:
                split = None if x is v else self.will_split(x, axis)
                if split is None:
                    continue
                if not dims[split] or not rule.splittable(dims[split][0]):
                    continue
                if dims[split][:1] in own:
                    return own.index(dims[split][:1])
        return None

    def will_split(self, x: Value, axis: str, ahead: int = AHEAD) -> int | None:
        """The dimension of a value that an axis splits plainly, also of one that a few equations make of others."""
        if x in self.held:
            return self.place(x).dim_of(axis) if self.place(x).mark(axis) == PLAIN else None
        eqn = self.makers_of.get(x)
        rule = self.rule(eqn) if eqn is not None and ahead else None
        if eqn is None or rule is None or len(rule.results) != 1 or rule.results[0] is None:
            return None
        for operand, dims in zip(tensors(eqn), rule.operands, strict=True):
            dim = self.will_split(operand, axis, ahead - 1)
            if dim is not None and dims[dim] and dims[dim] in rule.results[0] and rule.splittable(dims[dim][0]):
                return rule.results[0].index(dims[dim])
        return None

    def define(self, v: Value, *copies: Value) -> None:
        """A global value has its own place; a pinned one is brought to it at once."""
        self.held[v] = list(copies)
        if (pin := self.pins.get(v)) is not None:
            self.held[v] = [self.values.bring(v, pin)]
