"""Which chains of functional updates can be written straight into an input's memory.

A recorded write such as `cache[:, 3] = k` is a chain in the trace: the input, scatters and elementwise
operators over it, and the mutation that says the input ends up holding the last of them. `plan` finds the
chains whose old contents nobody reads after they are overwritten, and says for each update which part of the
input it writes (a path of views) and with what. `reinplace` carries a plan out; `schedule` keeps its order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from tessera.ir import fake
from tessera.ir.alias import FUNCTIONAL
from tessera.ir.equation import Arg, Equation, Special, Value, values_in
from tessera.ir.mode import mode_of
from tessera.ir.schema import bind, is_pointwise, schema_of
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, size_key
from tessera.ir.verify import same_type
from tessera.ir.views import RESHAPES, SWAPS
from tessera.ops.families import same_shape
from tessera.passes.memory.alias import Roots, escaping, roots, shown
from tessera.torch_internals.operators import OpOverload, op_name
from tessera.util.names import names

aten = torch.ops.aten

Step = tuple[OpOverload, tuple[Arg, ...], dict[str, Arg]]  # a view of what comes before it on the path
Path = tuple[Step, ...]


@dataclass(frozen=True)
class Leaf:
    """One update: at equation `index`, `op` writes the part of the input that `path` shows."""

    index: int
    path: Path
    op: OpOverload
    args: tuple[Arg, ...]  # after the target
    kwargs: dict[str, Arg]
    place: int = 0  # where the target stands among the arguments of `op`
    clone: bool = False  # its source overlaps what it writes: read it first


@dataclass
class Plan:
    """How one mutated input is written in place."""

    target: Value
    leaves: list[Leaf] = field(default_factory=list)
    shows: dict[Value, tuple[Path, int]] = field(default_factory=dict)  # value -> (where, after how many leaves)
    waits: list[tuple[int, int]] = field(default_factory=list)  # (equation, leaf) in this order


# --- operators that update their first argument -----------------------------------------------------


def _slice(dim: Arg = 0, start: Arg = None, end: Arg = None, step: Arg = 1) -> Step:
    return aten.slice.Tensor, (dim, start, end, step), {}


# scatter(base, src, *where) -> the view of base it replaces
SCATTERS: dict[str, Callable[..., Step]] = {
    "slice_scatter": _slice,
    "select_scatter": lambda dim, index: (aten.select.int, (dim, index), {}),
    "diagonal_scatter": lambda offset=0, dim1=0, dim2=1: (aten.diagonal.default, (offset, dim1, dim2), {}),
    "as_strided_scatter": lambda size, stride, offset=None: (aten.as_strided.default, (size, stride, offset), {}),
}
_UPDATES = names(
    """
    index_put index_copy index_add index_fill scatter scatter_add scatter_reduce masked_fill
    masked_scatter copy fill zero index_reduce
    """
)


@functools.cache
def inplace_of(op: OpOverload) -> OpOverload | None:
    """The overload that writes an update or elementwise operator's result into its first argument."""
    if op.namespace != "aten" or not (op_name(op) in _UPDATES or is_pointwise(op)):
        return None
    packet = getattr(torch.ops.aten, f"{op_name(op)}_", None)
    wanted = [(p.name, p.kind, p.keyword) for p in schema_of(op).params]
    if packet is None or not wanted or wanted[0][1] != "Tensor":
        return None
    for name in packet.overloads():
        overload = getattr(packet, name)
        schema = schema_of(overload)
        if schema.mutated == (0,) and [(p.name, p.kind, p.keyword) for p in schema.params] == wanted:
            return overload
    return None


def plan(trace: Trace, of: Roots | None = None) -> list[Plan]:
    """The mutated inputs that can be written in place, each with how."""
    if not trace.mutations:
        return []
    uses = _Uses(trace, of if of is not None else roots(trace))
    plans = []
    for target, value in trace.mutations.items():
        if target is not value:
            planned = _Finder(trace, uses, target).find(value)
            if planned is not None:
                plans.append(planned)
    return _without_conflicts(plans)


def _without_conflicts(plans: list[Plan]) -> list[Plan]:
    """An update that belongs to two inputs (two outputs of one operator) is carried out only if both are."""
    claimed: dict[int, Plan] = {}
    kept = []
    for p in plans:
        if any(leaf.index in claimed for leaf in p.leaves):
            continue
        claimed.update({leaf.index: p for leaf in p.leaves})
        kept.append(p)
    return kept


class _Uses:
    """Who makes and who reads what in a trace: found once, for every input that is written asks."""

    def __init__(self, trace: Trace, of: Roots) -> None:
        self.of, self.mode = of, mode_of(trace)
        self.places = trace.places()
        self.users = trace.users()
        self.readers: dict[Value, list[int]] = {}  # memory -> the equations that read it
        for index, eqn in enumerate(trace.equations):
            for root in shown(eqn.inputs(), of):
                self.readers.setdefault(root, []).append(index)
        self.handed_out = escaping(trace, of)
        self.ends_in: dict[Value, list[Value]] = {}  # memory -> the inputs that show it at the end
        for target, v in trace.mutations.items():
            for root in of[v]:
                self.ends_in.setdefault(root, []).append(target)


class _Finder:
    def __init__(self, trace: Trace, uses: _Uses, target: Value) -> None:
        self.trace, self.uses, self.of, self.target = trace, uses, uses.of, target
        self.index = uses.places
        self.plan = Plan(target)
        self.mode = uses.mode

    def find(self, value: Value) -> Plan | None:
        if not self.peel(value, lambda u: u is self.target, ()) or not self.plan.leaves:
            return None
        if not self.in_order() or not self.nobody_reads_late():
            return None
        return self.plan

    def maker(self, v: Value) -> Equation | None:
        return self.trace.equations[self.index[v]] if v in self.index else None

    # --- reading the chain ---

    def peel(self, v: Value, is_content: Callable[[Value], bool], path: Path) -> bool:
        """Is `v` the contents at `path` with updates in place? Notes those updates, oldest first."""
        if is_content(v):
            return True
        eqn = self.maker(v)
        if eqn is None:
            return False
        if isinstance(eqn.op, Special):
            done = eqn.op is FUNCTIONAL and self.peel_functional(eqn, v, is_content, path)
        elif eqn.opname in SCATTERS:
            done = self.peel_scatter(eqn, is_content, path)
        elif inplace_of(eqn.op) is not None:
            done = self.peel_update(eqn, is_content, path)
        else:
            done = self.peel_view(eqn, is_content, path)
        if done:
            self.plan.shows[v] = (path, len(self.plan.leaves))
        return done

    def peel_scatter(self, eqn: Equation, is_content: Callable[[Value], bool], path: Path) -> bool:
        base, src = eqn.args[:2]
        if not isinstance(base, Value) or not isinstance(src, Value) or not self.peel(base, is_content, path):
            return False
        step = SCATTERS[eqn.opname](*eqn.args[2:], **eqn.kwargs)
        before = len(self.plan.leaves), dict(self.plan.shows)
        # the source may itself be updates of the part it replaces: then only those are written
        if self.peel(src, lambda u: self.is_view(u, base, step), (*path, step)):
            return True
        del self.plan.leaves[before[0] :]
        self.plan.shows = before[1]
        self.leaf(eqn, (*path, step), aten.copy_.default, (src,), {})
        return True

    def peel_update(self, eqn: Equation, is_content: Callable[[Value], bool], path: Path) -> bool:
        base = eqn.args[0]
        if not isinstance(base, Value) or not _alike(base, eqn.out) or not self.peel(base, is_content, path):
            return False
        op = inplace_of(eqn.op)  # type: ignore[arg-type]
        assert op is not None
        self.leaf(eqn, path, op, eqn.args[1:], eqn.kwargs)
        return True

    def peel_functional(self, eqn: Equation, v: Value, is_content: Callable[[Value], bool], path: Path) -> bool:
        """`functional(op, …)` of an operator that writes exactly one tensor and gives nothing else."""
        op = eqn.args[0]
        assert isinstance(op, OpOverload)
        schema = schema_of(op)
        if len(schema.mutated) != 1 or len(eqn.results()) != 1:
            return False
        positional, keyword = bind(op, eqn.args[1:], eqn.kwargs)
        place = schema.mutated[0]
        if schema.params[place].keyword or not isinstance(positional[place], Value):
            return False
        base = positional[place]
        if not self.peel(base, is_content, path):
            return False
        rest = (*positional[:place], *positional[place + 1 :])
        self.leaf(eqn, path, op, rest, keyword, place)
        return True

    def peel_view(self, eqn: Equation, is_content: Callable[[Value], bool], path: Path) -> bool:
        """`t(copy(t(x), …))`: updates of a view, turned back by the view's inverse."""
        if len(eqn.outputs) != 1 or eqn.opname not in _INVERSES:
            return False
        inner = eqn.args[0]
        bottom = self.bottom(inner) if isinstance(inner, Value) else None
        view = self.maker(bottom) if bottom is not None else None
        if view is None or bottom is inner or len(view.outputs) != 1 or isinstance(view.op, Special):
            return False
        base = view.args[0]
        if not isinstance(base, Value) or not _alike(base, eqn.out) or not _undoes(eqn, view):
            return False
        step = self.view_step(view, base)
        if step is None or not self.peel(base, is_content, path):
            return False
        return self.peel(inner, lambda u: u is bottom, (*path, step))  # type: ignore[arg-type]

    def bottom(self, v: Value) -> Value | None:
        """What a chain of updates starts from."""
        while True:
            eqn = self.maker(v)
            if eqn is None or isinstance(eqn.op, Special):
                return v
            if eqn.opname in SCATTERS or inplace_of(eqn.op) is not None:
                base = eqn.args[0]
                if not isinstance(base, Value):
                    return None
                v = base
            else:
                return v

    def view_step(self, view: Equation, base: Value) -> Step | None:
        """The view as one that certainly shares memory: a reshape that copies cannot be written through."""
        if view.opname in RESHAPES:
            shape = list(view.out.shape)
            try:
                fake.infer(aten.view.default, (base, shape), {}, self.mode)
            except Exception:
                return None
            return aten.view.default, (shape,), {}
        return view.op, view.args[1:], view.kwargs  # type: ignore[return-value]

    def is_view(self, u: Value, base: Value, step: Step) -> bool:
        eqn = self.maker(u)
        if eqn is None or eqn.op is not step[0] or not eqn.args or eqn.args[0] is not base:
            return False
        mine = bind(step[0], (base, *step[1]), step[2])
        theirs = bind(step[0], eqn.args, eqn.kwargs)
        return _plain(mine) == _plain(theirs)

    def leaf(self, eqn: Equation, path: Path, op: OpOverload, args: tuple, kwargs: dict, place: int = 0) -> None:
        index = self.index[eqn.results()[0]]
        self.plan.leaves.append(Leaf(index, path, op, args, kwargs, place))

    # --- is it legal? ---

    def in_order(self) -> bool:
        """Updates come in the order of their equations, and none reads what it overwrites unless copied."""
        leaves = self.plan.leaves
        if any(p.index >= q.index for p, q in zip(leaves, leaves[1:], strict=False)):
            return False
        version = self.versions()
        for number, leaf in enumerate(leaves):
            reads = {root for v in values_in((leaf.args, leaf.kwargs)) for root in self.of[v] if root in version}
            if not reads:
                continue
            if leaf.op is not aten.copy_.default or any(version[root] != number for root in reads):
                return False
            leaves[number] = replace(leaf, clone=True)
        return True

    def versions(self) -> dict[Value, int]:
        """Roots that are the input's memory once the plan is carried out -> after how many updates."""
        return {self.target: 0, **{v: count for v, (_, count) in self.plan.shows.items()}}

    def nobody_reads_late(self) -> bool:
        """Each state of the memory is read only before the update that ends it; none is handed out."""
        version = self.versions()
        if not self.uses.handed_out.isdisjoint(version):
            return False
        last = len(self.plan.leaves)
        reads = sorted((index, count) for root, count in version.items() for index in self.uses.readers.get(root, ()))
        for index, count in reads:
            if count == last or any(v in self.plan.shows for v in self.trace.equations[index].results()):
                continue  # of what stays, or replaced by the plan
            update = self.plan.leaves[count].index
            if index >= update:
                return False
            self.plan.waits.append((index, update))
        for root, count in version.items():
            if count != last and any(other is not self.target for other in self.uses.ends_in.get(root, ())):
                return False
        return self.layouts_agree()

    def layouts_agree(self) -> bool:
        """Values that become views of the input have the strides their readers were compiled for."""
        own = set(self.plan.shows)
        for v, (path, _) in self.plan.shows.items():
            read = self.uses.users.get(v, ())
            if not any(not own.issuperset(eqn.results()) or not eqn.results() for eqn in read):
                continue
            shown: Value = self.target
            for op, args, kwargs in path:
                type_ = fake.infer(op, (shown, *args), kwargs, self.mode)
                if not isinstance(type_, TensorType):
                    return False
                shown = Value(v.name, type_)
            if not same_type(shown.type, v.type):
                return False
        return True


_INVERSES = RESHAPES | SWAPS | {"permute"}


def _undoes(outer: Equation, view: Equation) -> bool:
    """Does `outer` turn `view` back? Both are over the same number of elements."""
    first, second = view.opname, outer.opname
    if first in RESHAPES and second in RESHAPES:
        return True
    rank = view.out.ndim
    if first in SWAPS and second in SWAPS:
        return _swapped(view, rank) == _swapped(outer, rank)
    if first == second == "permute":
        there, back = view.args[1], outer.args[1]
        return [there[i % rank] % rank for i in back] == list(range(rank))  # type: ignore[index,union-attr]
    return False


def _swapped(eqn: Equation, rank: int) -> frozenset:
    return frozenset(d % rank for d in eqn.args[1:3]) if len(eqn.args) > 2 else frozenset(range(rank))  # type: ignore[operator]


def _alike(a: Value, b: Value) -> bool:
    return a.dtype == b.dtype and same_shape(a.shape, b.shape)


def _plain(tree: object) -> object:
    """A structure of arguments in which equal things compare equal."""
    if isinstance(tree, (list, tuple)):
        return tuple(map(_plain, tree))
    if isinstance(tree, dict):
        return tuple((k, _plain(v)) for k, v in tree.items())
    if isinstance(tree, Value):
        return id(tree)
    return size_key(tree) if not isinstance(tree, float) else repr(tree)
