"""A Trace as a graph of homes.

In: a cleaned, functional Trace with sizes that are numbers, and the tensors that its weights are. Out: a `Graph`. What
depends on weights alone is computed now. Operators that only move elements run on maps, by PyTorch itself. Arithmetic
and products have forms; any other operator is taken apart; what still has no form is refused with the user's line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch

from tessera.ir.equation import Arg, Equation, Source, Special, Value, map_values
from tessera.ir.schema import draws
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops.control import COND
from tessera.spatial.errors import MapError
from tessera.spatial.graph import Constant, Gather, Input, Left, Product, Scatter
from tessera.spatial.importer.decompose import Decompositions
from tessera.spatial.importer.hosted import hosted
from tessera.spatial.importer.moves import MOVES, filled_with, has_rule, moved, padded_ones
from tessera.spatial.importer.values import Item, Known, Lazy, Values, fold
from tessera.spatial.maps import Home, Map, whole, zeros
from tessera.torch_internals.operators import OpOverload, aten_name

Form = Callable[..., Item | list[Item]]
Movable = torch.Tensor | Map
FORMS: dict[str, Form] = {}
DEPTH = 8  # how often parts are taken apart themselves
FOLDED = 1 << 28  # elements; a larger tensor is not computed ahead of time
_CLAIMS = ("_assert", "sym_constrain", "_linalg_check_errors")


def has_form(op: object) -> bool:
    return isinstance(op, OpOverload) and op.namespace == "aten" and ((n := aten_name(op)) in FORMS or n in MOVES)


def form(text: str) -> Callable[[Form], Form]:
    def add(fn: Form) -> Form:
        FORMS.update(dict.fromkeys(text.split(), fn))
        return fn

    return add


@dataclass(frozen=True)
class State:
    """A buffer that is kept between runs: the matrix that it is, and which dimensions are its rows and columns."""

    home: Home
    index: Map
    order: list[int]


class Importer:
    """Imports into a graph that others may import into as well: other ranks, and other batches, each of which reads
    rows of the inputs and gives rows of the outputs."""

    def __init__(
        self,
        trace: Trace,
        values: Values,
        decompositions: Decompositions,
        batches: int = 1,
        carried: tuple[Value, ...] = (),
        varying: Set[Value] = frozenset(),
    ) -> None:
        self.trace, self.values, self.graph, self.decompositions = trace, values, values.graph, decompositions
        self.batches, self.carried = batches, carried  # inputs that an earlier part of the program leaves
        self.varying = varying  # weights that are others in other blocks with this program
        self.env: dict[Value, Item] = {}
        self.readers: dict[Value, int] = {}  # that are still to come
        self.states: dict[Value, State] = {}
        self.peers = [self]  # all ranks, which may read each other's states
        self.eqn: Equation | None = None  # the one that is being imported

    def begin(self, weights: Mapping[Value, tuple[str, torch.Tensor]]) -> None:
        """Inputs and constants, before the first equation."""
        for v in self.trace.inputs:
            if v in weights:
                name, data = weights[v]
                known = Known(data.detach(), name, v in self.varying)
                self.env[v] = self.state(v, name, data) if v in self.trace.mutations else known
            elif v in self.carried:
                shape, number = sizes(v), self.carried.index(v)
                home = self.graph.left(number, v.dtype, *fold(shape))
                self.graph.add(Left(home))
                self.env[v] = Lazy(shape, v.dtype, 0, (whole(home, shape),), home.name)
            else:
                self.env[v] = self.input(v)
        self.count(self.trace)

    def output(self, number: int) -> tuple[torch.dtype, Map]:
        o = self.trace.outputs[number]
        item = self.item(o)
        return dtype_of(item), self.values.map(item)

    def input(self, v: Value) -> Item:
        if not isinstance(v.type, TensorType) or not all(isinstance(n, int) for n in v.type.shape):
            raise MapError(f"{v.name} is {v.type}: expected a tensor whose sizes are numbers; give one size at a time")
        if v.dtype.is_complex:
            raise MapError(f"{v.name} is {v.type}: expected real numbers")
        shape = sizes(v)
        home = self.graph.home(v.name, v.dtype, *fold(shape))
        if v not in self.graph.given:
            given = shape if self.batches == 1 else (shape[0] * self.batches, *shape[1:])
            self.graph.given[v] = home.name
            self.graph.inputs.append((home.name, v.dtype, given, home))
        if not home.size:
            return _nothing(v)
        self.graph.add(Input(home, self.graph.given[v], self.graph.place.batch * home.rows))
        return Lazy(shape, v.dtype, 0, (whole(home, shape),), home.name)

    def state(self, v: Value, name: str, data: torch.Tensor) -> Lazy:
        """A buffer that the program writes: a dimension along which it is written is the matrix's rows."""
        dim = next((d for eqn in self.trace.equations if (d := written_along(eqn, v)) is not None), 0)
        shape = tuple(data.shape) or (1,)
        order = [dim, *(d for d in range(len(shape)) if d != dim)]
        rows = data.detach().reshape(shape).permute(order)
        home = self.graph.home(name, data.dtype, rows.shape[0], rows[0].numel())
        grain = rows.shape[-1] if rows.ndim > 1 else 1
        self.graph.add(Constant(home, rows.reshape(home.rows, home.columns).clone(), True, grain))
        index = whole(home, rows.shape).permute(*(order.index(d) for d in range(len(shape)))).reshape(*data.shape)
        self.states[v] = State(home, index, order)
        return Lazy(tuple(data.shape), data.dtype, 0, (index,), name)

    def scattered(self, x: Lazy, dim: int, index: Item, rows: Item) -> Item:
        """A state after rows of it were written."""
        assert self.eqn is not None
        old = self.values.map(x)
        order = [dim, *(d for d in range(old.ndim) if d != dim)]
        before = old.permute(*order).only
        if before is None or not self.is_state(before):
            return NotImplemented
        index, rows = (self.apart(item, before) for item in (index, self.values.cast(rows, x.dtype)))
        at = self.values.map(index)
        at = at.reshape(at.size, 1)
        new = self.values.map(rows)
        new = new.expand(*(at.shape[0] if d == dim else n for d, n in enumerate(old.shape)))
        values = new.permute(*order).reshape(at.shape[0], before.columns)
        home = self.write(before, at, values, self.name(), self.eqn.source)
        return Lazy(x.shape, x.dtype, 0, (old.moved_to(home),), home.name, self.eqn.source)

    def write(self, before: Home, at: Map, values: Map, name: str, source: Source) -> Home:
        """Rows of a state are written. What was read there before, and is still wanted, is copied first."""
        for im in self.peers:
            im.env = {v: im.apart(item, before) for v, item in im.env.items() if im.readers.get(v, 0) > 0}
        home = self.graph.home(name, before.dtype, before.rows, before.columns, source)
        self.graph.add(Scatter(home, before, at, values))
        return home

    def apart(self, item: Item, home: Home) -> Item:
        """A value; its copy, where it is read in a home."""
        reads = isinstance(item, Lazy) and any(home in m.homes for m in item.operands)
        return self.values.written(item) if reads else item  # type: ignore[arg-type]

    def is_state(self, home: Home) -> bool:
        return any(home is state.home for state in self.states.values()) or any(
            isinstance(n, Scatter) and n.home is home for n in self.graph.nodes
        )

    def keep_states(self) -> None:
        """At the end, a state that is something else than the rows written into it is written whole."""
        after = {n.state: n.home for n in self.graph.nodes if isinstance(n, Scatter)}
        for v, state in self.states.items():
            last, kept = state.home, self.trace.mutations[v]
            while last in after:
                last = after[last]
            now = self.values.cast(self.env[kept], v.dtype)
            if now.tree == 0 and now.index == state.index.moved_to(last):
                continue
            new = self.values.map(self.apart(now, last)).reshape(*(sizes(v) or (1,))).permute(*state.order)
            self.write(
                last, self.values.every(last.rows), new.reshape(last.rows, last.columns), state.home.name, now.source
            )

    def count(self, trace: Trace) -> None:
        """Constants of a trace, and how many read each of its values."""
        for v, data in trace.constants.items():
            self.env[v] = Known(data.detach(), v.name)
        read = [v for eqn in trace.equations for v in dict.fromkeys(eqn.inputs())]
        self.readers.update(Counter([*read, *trace.results()]))

    # --- equations ---

    def passed(self, eqn: Equation) -> None:
        """An equation reads its arguments now."""
        for v in dict.fromkeys(eqn.inputs()):
            self.readers[v] = self.readers.get(v, 0) - 1

    def equation(self, eqn: Equation, depth: int = DEPTH) -> None:
        self.passed(eqn)
        if eqn.opname.startswith(_CLAIMS):
            return
        if not isinstance(eqn.op, Special) and draws(eqn.op, eqn.args, eqn.kwargs):
            why = "which such a machine has none of (model.eval() leaves dropout out)"
            raise MapError(f"{eqn.op} draws random numbers, {why}: {where(eqn)}")
        if unsized := next((v for v in eqn.results() if not _is_sized(v)), None):
            raise MapError(
                f"{eqn.op} gives {unsized.type}, a size that depends on data: expected sizes that are numbers, such as "
                f"the largest one (a bucket) with a mask over what is not there (torch.where, topk): {where(eqn)}"
            )
        self.eqn = eqn
        if eqn.results() and not any(v.numel() for v in eqn.results()):
            self.bind(eqn, [None if v is None else _nothing(v) for v in eqn.outputs])  # type: ignore[misc]
        elif self.is_known(eqn):
            self.bind(eqn, self.computed(eqn))
        elif unreal := next((v for v in eqn.results() if isinstance(v.type, TensorType) and v.dtype.is_complex), None):
            raise MapError(f"{eqn.op} gives {unreal.type}, which has no form: expected real numbers: {where(eqn)}")
        elif eqn.opname in MOVES and has_rule(eqn):
            self.bind(eqn, self.moved(eqn))
        elif eqn.opname in FORMS:
            positional, keyword = eqn.bound()
            result = FORMS[eqn.opname](self, *map_values(positional, self.read), **map_values(keyword, self.read))  # type: ignore[arg-type]
            if result is NotImplemented:
                self.decompose(eqn, depth)
            else:
                self.bind(eqn, result if isinstance(result, list) else [result])
        elif eqn.op is COND:
            self.bind(eqn, self.either(eqn))
        elif (call := hosted(self.values, self.env, eqn)) is not None:
            self.bind(eqn, call)
        else:
            self.decompose(eqn, depth)

    def read(self, v: Value) -> Item:
        return self.env[v]

    def is_known(self, eqn: Equation) -> bool:
        known = all(isinstance(self.env[v], Known) for v in eqn.inputs())
        return known and not isinstance(eqn.op, Special) and all(v.numel() <= FOLDED for v in eqn.results())

    def computed(self, eqn: Equation) -> list[Item]:
        """The results of an operator on tensors that are known."""
        args, kwargs = map_values((eqn.args, eqn.kwargs), lambda v: self.env[v].data)  # type: ignore[misc,union-attr]
        with torch.no_grad():
            out = eqn.op(*args, **_here(kwargs))  # type: ignore[operator]
        given = [self.env[v] for v in eqn.inputs()]
        turned = ".T" if eqn.opname in ("t", "transpose", "permute") else ""
        name = f"{given[0].name}{turned}" if turned and given else eqn.outputs[0].name  # type: ignore[union-attr]
        if eqn.opname in ("detach", "alias", "view", "clone") and given:
            name = given[0].name
        varies = any(known.varies for known in given)  # type: ignore[union-attr]
        return [Known(t, name, varies) for t in (out if isinstance(out, (list, tuple)) else [out])]

    def moved(self, eqn: Equation) -> list[Item]:
        """The maps of an operator's results: it runs on the maps of its arguments."""
        kinds = {self.env[v].dtype if isinstance(self.env[v], Lazy) else self.env[v].data.dtype for v in eqn.inputs()}  # type: ignore[union-attr]
        dtype = eqn.results()[0].dtype
        if len(kinds) > 1:  # a concatenation of several types
            maps = {v: self.values.map(self.values.cast(self.env[v], dtype)) for v in eqn.inputs()}
        else:
            maps = {v: self.values.map(self.env[v]) for v in eqn.inputs()}
        if len(kinds) == 1 and dtype not in kinds:
            raise MapError(f"{eqn.op} takes the bits of another type, which has no form: {where(eqn)}")
        items: list[Item] = []
        for v, index in zip(eqn.outputs, moved(eqn, maps, self.graph.homes), strict=True):
            items.append(Lazy(index.shape, dtype, 0, (index,), v.name if v is not None else "v", eqn.source))
        if (value := filled_with(eqn)) != 0:
            inside = Known(padded_ones(eqn), "inside")
            value = value if dtype.is_floating_point else int(value)
            return [self.apply("where", inside, items[0], value, dtype=dtype)]
        return items

    def decompose(self, eqn: Equation, depth: int) -> None:
        """Import an equation as the equations that it is made of."""
        parts = self.decompositions.of(eqn) if depth and not isinstance(eqn.op, Special) else None
        if parts is None:
            raise MapError(f"{eqn.op} has no form on a spatial machine: {where(eqn)}")
        for inner, outer in zip(parts.inputs, dict.fromkeys(eqn.inputs()), strict=True):
            self.env[inner] = self.env[outer]
        sourced = parts.with_(equations=tuple(e.with_(source=eqn.source) for e in parts.equations))
        self.count(sourced)
        for part in sourced.equations:
            self.equation(part, depth - 1)
        self.eqn = eqn
        self.bind(eqn, [self.env[o] if isinstance(o, Value) else None for o in parts.outputs])  # type: ignore[misc]

    def bind(self, eqn: Equation, items: Sequence[Item | None]) -> None:
        """Results, of the type that the equation says; what has several readers is written once."""
        for v, item in zip(eqn.outputs, items, strict=True):
            if v is None or item is None:
                continue
            if isinstance(item, Lazy):
                item = self.values.cast(item, v.dtype)
                if item.shape != tuple(v.shape):
                    raise MapError(f"{eqn.op} gives {item.shape}, expected {tuple(v.shape)}: {where(eqn)}")
                if self.readers.get(v, 0) > 1 and not isinstance(item.tree, int):
                    item = self.values.plain(item)
            self.env[v] = item

    def either(self, eqn: Equation) -> list[Item | None]:
        """Both branches are computed, since data decide no times; where the condition holds, the first is taken."""
        chosen, *branches = eqn.args[:3]
        results = []
        for branch in branches:
            assert isinstance(branch, Trace)
            self.env |= {v: self.item(of) for v, of in zip(branch.inputs, eqn.args[3:], strict=True)}
            self.count(branch)
            for part in branch.equations:
                self.equation(part)
            results.append([self.item(o) for o in branch.outputs])
        self.eqn = eqn
        pairs = zip(eqn.outputs, *results, strict=True)
        return [None if v is None else self.apply("where", self.item(chosen), a, b, dtype=v.dtype) for v, a, b in pairs]

    def item(self, of: Arg) -> Item:
        """A value, or a number as one."""
        return self.env[of] if isinstance(of, Value) else Known(torch.tensor(of))

    # --- what forms are made of ---

    def name(self) -> str:
        assert self.eqn is not None
        return self.eqn.results()[0].name

    def apply(self, fn: str, *items: Item | float, dtype: torch.dtype | None = None) -> Lazy:
        assert self.eqn is not None
        dtype = dtype or self.eqn.results()[0].dtype
        args = [_number(i, dtype) if isinstance(i, (bool, int, float)) else i for i in items]
        return self.values.apply(fn, args, dtype, self.name(), self.eqn.source)

    def reduce(self, fn: str, x: Item, dims: list[int], keep: bool, dtype: torch.dtype | None = None) -> Lazy:
        assert self.eqn is not None
        x = self.values.lazy(x)
        dims = sorted({d % max(len(x.shape), 1) for d in dims} or range(len(x.shape)))
        named = replace(x, name=self.name(), source=self.eqn.source)
        return self.values.reduced(fn, named, dims if x.shape else [], keep, dtype or self.eqn.results()[0].dtype)

    def product(self, x: Item, w: Item, rounded: torch.dtype | None = None) -> Lazy:
        """[…, m, k] by […, k, n]; the sums are of the type in which the array adds. The result is rounded to the
        factors' type, unless another is asked for."""
        assert self.eqn is not None
        dtype = torch.promote_types(dtype_of(x), dtype_of(w))
        x, w = (self.values.cast(i, dtype) if isinstance(i, Lazy) and i.dtype != dtype else i for i in (x, w))
        if not dtype.is_floating_point and dtype != torch.int8:
            return self.vector_product(x, w, dtype)
        a, b = self.values.map(x), self.values.map(w)
        batch = tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
        count = math.prod(batch)
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        if not k:  # a sum of nothing
            return Lazy((*batch, m, n), rounded or dtype, 0, (zeros((*batch, m, n)),), self.name(), self.eqn.source)
        shared = b.ndim == 2 or all(size == 1 for size in b.shape[:-2])
        if shared and count > 1:  # one product of all rows
            m, count = m * count, 1
            a = a.expand(*batch, *a.shape[-2:])
        left = a.expand(*batch, *a.shape[-2:]).reshape(count, m, k) if not shared else a.reshape(count, m, k)
        right = b.reshape(1, k, n) if shared else b.expand(*batch, k, n).reshape(count, k, n)
        home = self.graph.home(self.name(), sum_type(dtype), count * m, n, self.eqn.source)
        self.graph.add(Product(home, left, right, dtype))
        shape = (*batch, a.shape[-2], n)
        result = Lazy(shape, home.dtype, 0, (whole(home, shape),), home.name, self.eqn.source)
        return self.values.cast(result, rounded or dtype) if dtype.is_floating_point else result

    def vector_product(self, x: Item, w: Item, dtype: torch.dtype) -> Lazy:
        """Of integers that no array multiplies: sums of products of elements."""
        a = self.relaid(x, lambda t: t.reshape(*t.shape[:-1], 1, t.shape[-1]))
        b = self.relaid(w, lambda t: t.transpose(-1, -2).reshape(*t.shape[:-2], 1, t.shape[-1], t.shape[-2]))
        return self.reduce("sum", self.apply("mul", a, b, dtype=dtype), [-1], False, dtype)

    def gather(self, table: Item, index: Item) -> Lazy:
        assert self.eqn is not None
        rows, at = self.values.map(table), self.values.map(index)
        flat = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
        home = self.graph.home(self.name(), dtype_of(table), at.size, flat.shape[1], self.eqn.source)
        self.graph.add(Gather(home, flat, at.reshape(at.size, 1)))
        shape = (*at.shape, *rows.shape[1:])
        return Lazy(shape, home.dtype, 0, (whole(home, shape),), home.name, self.eqn.source)

    def wrapped(self, index: Item, size: int) -> Item:
        """Places of which those below 0 count from the end; computed once for all who read as many rows."""
        if isinstance(index, Known):
            return replace(index, data=torch.where(index.data < 0, index.data + size, index.data))
        key = self.values.map(index), size
        if key not in self.values.wrapped:
            kind = index.dtype
            below, further = self.apply("lt", index, 0, dtype=torch.bool), self.apply("add", index, size, dtype=kind)
            places = self.apply("where", below, further, index, dtype=kind)
            self.values.wrapped[key] = self.values.plain(places)
        return self.values.wrapped[key]

    def relaid(self, x: Item, fn: Callable[[Movable], Movable]) -> Item:
        """A value whose elements are moved by a function of tensors or maps."""
        if isinstance(x, Known):
            return replace(x, data=fn(x.data))
        index = fn(self.values.map(x))
        assert isinstance(index, Map)
        return Lazy(index.shape, x.dtype, 0, (index,), x.name, x.source)


def sizes(v: Value) -> tuple[int, ...]:
    """The shape of a value whose sizes are numbers."""
    return tuple(int(n) for n in v.shape)


def written_along(eqn: Equation, v: Value) -> int | None:
    """The dimension along which an equation writes rows into a value."""
    if not eqn.args or eqn.args[0] is not v:
        return None
    if eqn.opname == "index_copy":
        return eqn.args[1] if isinstance(eqn.args[1], int) else None
    if eqn.opname == "index_put" and isinstance(eqn.args[1], (list, tuple)):
        places = [d for d, i in enumerate(eqn.args[1]) if i is not None]
        return places[0] if len(places) == 1 else None
    return None


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """What an array adds in."""
    if not dtype.is_floating_point:
        return torch.int32
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def dtype_of(x: Item) -> torch.dtype:
    return x.dtype if isinstance(x, Lazy) else x.data.dtype


def _nothing(v: Value) -> Known:
    """A tensor without elements is known."""
    return Known(torch.empty(sizes(v), dtype=v.dtype), v.name)


def _number(value: float, dtype: torch.dtype) -> Known:
    if isinstance(value, bool):
        return Known(torch.tensor(value))
    wide = torch.float64 if isinstance(value, float) or dtype.is_floating_point else torch.int64
    return Known(torch.tensor(value, dtype=wide))


def _here(kwargs: Arg) -> dict:
    """Tensors are computed where the weights lie."""
    assert isinstance(kwargs, dict)
    return {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}


def _is_sized(v: Value) -> bool:
    return isinstance(v.type, TensorType) and all(isinstance(n, int) for n in v.type.shape)


def where(eqn: Equation) -> str:
    return f"called at {eqn.source}" if str(eqn.source) else "at an unknown line"
