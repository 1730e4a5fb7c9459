"""Local rewrites to one plain form.

In: a functional trace. Out: a trace that gives the same values bit for bit, of the same types, with nothing
done that does nothing: no additions of zero, no casts to the same dtype, no views of views, no copies nobody
can tell from their source. What differentiation sees stays: a value that is overwritten whole gets a gradient of zeros,
not none. With `differentiable=False`, where no differentiation follows, marks that only derivatives see (`detach`,
`keep_grad`, `once_differentiable`) go too.

What is fresh memory for the caller stays fresh: a result that reaches an output is never replaced by a value
it did not share memory with before, and what stands in for a copy is not an input's memory or the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Equation, Value, values_in
from tessera.ir.match import Match, P, Table, Var, rewrite
from tessera.ir.record import NO_GRAD
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops.families import same_shape
from tessera.ops.tied import TIED
from tessera.passes.memory.alias import Roots, escaping, roots
from tessera.util.names import names

x, y, src = Var("x"), Var("y"), Var("src")
a, b, shape, dims = Var("a"), Var("b"), Var("shape"), Var("dims")


# --- what an argument must be ---


def anything(_: Arg) -> bool:
    return True


def zero(n: Arg) -> bool:
    """Not -0.0: x - -0.0 is x + 0.0, which makes 0.0 of -0.0."""
    return type(n) in (int, float) and n == 0 and math.copysign(1, n) == 1  # type: ignore[operator,arg-type]


def one(n: Arg) -> bool:
    return type(n) in (int, float) and n == 1


# --- side conditions ---


def _dtype(m: Match) -> torch.dtype:
    return m.captures["x"].dtype  # type: ignore[union-attr]


def is_integer(m: Match) -> bool:
    """-0.0 + 0 is 0.0: only whole numbers are left as they are by adding zero."""
    return not _dtype(m).is_floating_point and not _dtype(m).is_complex and _dtype(m) is not torch.bool


def is_real(m: Match) -> bool:
    """A complex product with one makes a nan of an infinity."""
    return not _dtype(m).is_complex and _dtype(m) is not torch.bool


def is_alike(m: Match) -> bool:
    """Shape, dtype and device stay; of others nothing can stand for the result."""
    given = m.captures["x"]
    return isinstance(given, Value) and isinstance(given.type, TensorType) and _alike(given, m.root.out)


def is_round_trip(m: Match) -> bool:
    """Through a wider float type and back loses nothing."""
    narrow, wide = _dtype(m), m.inner[0].out.dtype
    wider = {torch.bfloat16: (torch.float32, torch.float64), torch.float16: (torch.float32, torch.float64),
             torch.float32: (torch.float64,)}  # fmt: skip
    return wide in wider.get(narrow, ())


def undo(m: Match) -> bool:
    """Both transpositions swap the same two dimensions."""
    rank = m.root.out.ndim
    first = {d % rank for d in m.inner[0].args[1:3]}  # type: ignore[operator]
    return first == {d % rank for d in m.root.args[1:3]}  # type: ignore[operator]


def inner_is_free(m: Match) -> bool:
    """The inner reshape moves no data; merging one that does could move it twice."""
    t = m.captures["x"].tensor  # type: ignore[union-attr]
    return m.inner[0].opname != "reshape" or (not t.is_symbolic and t.is_row_major)


# --- replacements that need a line or two ---


def merge_permutes(x: Value, a: list[int], b: list[int]) -> Value:
    rank = len(a)
    merged = [a[i % rank] % rank for i in b]
    return x if merged == list(range(rank)) else aten.permute(x, merged)


def unless_moved(x: Value, dims: list[int]) -> Value | None:
    return x if [d % len(dims) for d in dims] == list(range(len(dims))) else None


def again(name: str) -> Callable[[Value, Arg], Value]:
    """The same operator over what the inner one started from."""
    return lambda x, shape: getattr(aten, name.removeprefix("aten."))(x, shape)


def if_same(x: Value, shape: Arg = None) -> Value:
    return x  # refused unless the types are equal


def last_writer(x: Value, src: Arg) -> Value | None:
    """copy(x, src) holds src; a smaller src is spread over x's shape."""
    return src if isinstance(src, Value) and _alike(src, x) else None


cast = P("aten._to_copy", x, dtype=anything)
VIEWS = ("aten.view", "aten.reshape", "aten._unsafe_view")

TABLE = Table(
    [
        # numbers
        (P("aten.add", x, zero), lambda x: x, is_integer),  # n + 0 -> n
        (P("aten.sub", x, zero), lambda x: x, is_real),  # x - 0 -> x
        (P("aten.mul", x, one), lambda x: x, is_real),  # x * 1 -> x
        (P("aten.div", x, one), lambda x: x, is_real),  # x / 1 -> x
        (P("aten.pow", x, one), lambda x: x, is_real),  # x ** 1 -> x
        (P("tessera.tied", x, anything), lambda x: x),  # where nothing comes of the other
        (P("aten.neg", P("aten.neg", x)), lambda x: x),  # -(-x) -> x
        (P("aten.relu", P("aten.relu", x)), lambda x: aten.relu(x)),  # relu(relu(x)) -> relu(x)
        # casts and copies
        (cast, if_same, is_alike),  # to its own dtype
        (P("aten._to_copy", x), if_same, is_alike),
        (P("aten._to_copy", cast, dtype=anything), lambda x: x, is_round_trip),
        (P("aten.clone", x, ...), if_same, is_alike),
        (P("aten.contiguous", x, ...), if_same, is_alike),
        (P("aten.copy", x, src, ...), last_writer),  # copy(x, src) -> src
        # dropout that drops nothing
        (P("aten.dropout", x, ...), lambda x: x, lambda m: _keeps_all(m.root)),
        # views of views
        *((P(v, x, shape), if_same, is_alike) for v in VIEWS),  # x.view(x.shape) -> x
        *(
            (P(outer, P(inner, x, ...), shape), again(outer), inner_is_free)
            for outer in ("aten.view", "aten.reshape")
            for inner in VIEWS
        ),
        (P("aten.expand", x, shape), if_same, is_alike),
        (P("aten.expand", P("aten.expand", x, ...), shape), lambda x, shape: aten.expand(x, shape)),
        (P("aten.t", P("aten.t", x)), lambda x: x),
        (P("aten.transpose", P("aten.transpose", x, ...), ...), lambda x: x, undo),
        (P("aten.permute", P("aten.permute", x, a), b), merge_permutes),
        (P("aten.permute", x, dims), unless_moved),
        (P("aten.slice", x), if_same, is_alike),
        (P("aten.slice", x, dims, anything, anything), lambda x, dims: x),  # x[:, -1:] of one, refused of more
        (P("aten.squeeze", P("aten.unsqueeze", x, a), a), lambda x, a: x),
        (P("aten.alias", x), lambda x: x),
        (P("aten.detach", P("aten.detach", x)), lambda x: aten.detach(x)),
    ]
)  # fmt: skip

# Where no differentiation follows.
FORGET_GRAD = Table(
    [
        (P("aten.detach", x), lambda x: x),
        (P("tessera.keep_grad", lambda old: True, x, ...), lambda x: x),
        (P("tessera.keep_grad", lambda old: True, x, ...), lambda x: aten.alias(x)),  # two results, in one memory
        (P("tessera.once_differentiable", x, ...), lambda x: x),
    ]
)


def _keeps_all(eqn: Equation) -> bool:
    rest = eqn.args[1:]
    return len(rest) == 2 and (rest[1] is False or rest[0] == 0)


def canonicalise(trace: Trace, differentiable: bool = True, wrt: Collection[Value] | None = None) -> Trace:
    """Rewrite by the tables above until nothing changes. `wrt`: the inputs that will be differentiated, if not all."""
    table = TABLE if differentiable else _ALL
    if not any(table.rules_for(eqn.op) for eqn in trace.equations):
        return trace
    return rewrite(trace, table, _Legal(trace, differentiable, wrt).allow)


_ALL = TABLE + FORGET_GRAD

# Operators that read their second argument only to store it: its strides and its memory are nobody's concern.
_STORES = names("slice_scatter select_scatter diagonal_scatter as_strided_scatter copy")


class _Legal:
    """May a value stand in for a result, given what shares memory with whom?"""

    def __init__(self, trace: Trace, differentiable: bool, wrt: Collection[Value] | None = None) -> None:
        self.differentiable = differentiable
        self.active = _active(trace, trace.inputs if wrt is None else wrt) if differentiable else set()
        self.of: Roots = roots(trace)
        self.given = set(values_in(trace.outputs))
        self.mutated = set(trace.mutations)
        self.own = {v for eqn in trace.equations for v in eqn.results()}
        self.outside = escaping(trace, self.of)
        self.users = trace.users()
        self.results = set(trace.results())
        self.stands: dict[Value, frozenset[Value]] = {}

    def allow(self, eqn: Equation, new: Value) -> bool:
        if not self.legal(eqn, new):
            return False
        self.stands[eqn.out] = self.roots(new)
        return True

    def roots(self, v: Value) -> frozenset[Value]:
        """Its memory, given what stands in for what by now."""
        memory: set[Value] = set()
        for root in self.of[v]:
            memory |= self.stands.get(root, {root})
        return frozenset(memory)

    def legal(self, eqn: Equation, new: Value) -> bool:
        old = eqn.out
        if self.differentiable and NO_GRAD in eqn.tags and old.is_differentiable:
            return False  # the value may carry a gradient that the result must not
        if _is_copy(eqn) and eqn.args[0] in self.active and not self.goes_into_active(old):
            return False  # what is overwritten gets a gradient of zeros, and the result requires grad
        if _ties(eqn) and eqn.args[-1 if eqn.op is TIED else 0] in self.active:
            return False  # in eager the gradient of x ** 1 depends on x, though it is always one
        if new not in self.of or old not in self.of or not _alike(new, old):
            return False
        stored = old not in self.results and all(_only_stores(user, old) for user in self.users.get(old, ()))
        if not stored and new.type != old.type:
            return False
        mine, its = self.roots(old), self.roots(new)
        if mine != {old} and mine <= its | {old}:  # a view: it shares that memory anyway
            return old not in self.given or (new in self.own and new not in self.given)
        if not mine.isdisjoint(self.outside):
            return False
        if stored and its.isdisjoint(self.mutated):  # else the copy may be what keeps the old contents
            return True
        return its.isdisjoint(self.outside) and its <= self.own

    def goes_into_active(self, v: Value) -> bool:
        """It is only stored into part of something that carries a gradient: what was there before does so still."""
        users = self.users.get(v, ())
        return v not in self.results and all(_only_stores(e, v) and e.args[0] in self.active for e in users)


def _active(trace: Trace, wrt: Collection[Value]) -> set[Value]:
    """Values through which gradients of these inputs flow; found only where somebody asks."""
    if not any(_is_copy(eqn) or _ties(eqn) for eqn in trace.equations):
        return set()
    active = {v for v in wrt if v.is_differentiable}
    for eqn in trace.equations:
        if NO_GRAD not in eqn.tags and eqn.opname != "detach" and any(v in active for v in eqn.inputs()):
            active.update(v for v in eqn.results() if v.is_differentiable)
    return active


def _is_copy(eqn: Equation) -> bool:
    return eqn.opname == "copy"


def _ties(eqn: Equation) -> bool:
    return eqn.op is TIED or eqn.opname == "pow"


def _alike(new: Value, old: Value) -> bool:
    """Equal but for their strides."""
    same = new.dtype == old.dtype and new.tensor.device == old.tensor.device
    return same and same_shape(new.shape, old.shape)


def _only_stores(eqn: Equation, v: Value) -> bool:
    return eqn.opname in _STORES and eqn.args[0] is not v and len(eqn.args) > 1 and eqn.args[1] is v
