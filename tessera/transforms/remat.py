"""Chooses what forward saves for backward; `halves` then splits the joint trace.

In: a `Joint` (forward and backward in one program). Out: a forward trace that also gives what is saved, and
a backward trace from saved values and cotangents to gradients. What is saved is a minimum cut: each value
costs its bytes, an equation may be recomputed if the policy allows it. A little is added for what is recomputed, and
more for what forward would have to write only to save it, so that a few bytes less are not bought with kernels. What
lies inside of a value that is saved is read there. With a memory budget the policy is relaxed, cheapest flops per byte
first, until the saved bytes fit.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from types import MappingProxyType

import torch

from tessera.ir.dist import is_collective
from tessera.ir.equation import Equation, Value, recompute_region, values_in
from tessera.ir.schema import has_effect, is_view
from tessera.ir.starts import starts
from tessera.ir.types import TensorType
from tessera.ops.fp8 import rounds
from tessera.ops.op import flops, rules
from tessera.transforms.enclosed import Place, enclosed
from tessera.transforms.halves import Halves, Split, nbytes
from tessera.transforms.mincut import INFINITE, min_cut
from tessera.transforms.vjp import Joint
from tessera.util.config import check_flags
from tessera.util.search import first_that_fits

ALIVE = 0.05  # of its bytes: what keeping an input or output costs, which the caller mostly has anyway
FUSED = 1.1  # times its bytes: what a kernel would write for backward's sake alone, beside what it writes anyway
AGAIN = 0.02  # of its bytes: what computing a value again costs
ALIKE = 1.02  # times the bytes that are saved: what is as good as the same
LARGE = 1 << 20  # bytes from which on it counts whether a value is kept
COPIED = 1 << 18  # bytes that are worth a launch that copies them again
NOTHING: Mapping[Value, Place] = MappingProxyType({})


def remat(joint: Joint, policy: str = "auto", budget: int | None = None) -> Split:
    """Split a joint trace, saving as little as the policy and the budget ask for."""
    check_flags({"recompute": policy})
    plan = _Plan(joint)
    allowed = plan.allowed(policy)
    saved, allowed = plan.unchained(plan.cut(allowed, AGAIN), allowed)
    if policy == "cheap":  # where kernels read them, which take any strides
        saved = plan.uncopied(plan.inside(saved, allowed))
    if budget is not None and plan.bytes(saved) > budget:
        plan.held = {}
        saved = plan.fit(budget)
    return plan.halves.split(saved, plan.held)


class _Plan:
    def __init__(self, joint: Joint) -> None:
        self.halves = halves = Halves(joint)
        self.trace, self.maker = halves.trace, halves.maker
        self.primals, self.given, self.cts = halves.primals, halves.given, halves.cts
        self.outputs, self.grads = halves.outputs, halves.grads
        self.early, self.late, self.needed, self.bytes = halves.early, halves.late, halves.needed, halves.bytes
        self.boundary = self._boundary()
        self.passing: dict[Equation, list[Value]] = {}  # what equations read that a library call went around
        self.stored = self._stored()
        self.parts = self._parts()
        self.held: dict[Value, Place] = {}  # what backward reads inside of a saved value
        self._ranks: dict[Equation, int] = {}

    # --- what may be recomputed ---

    def allowed(self, policy: str) -> set[Equation]:
        """Equations backward may run again. Those only backward asked for run there at no extra cost."""
        level = {"none": 0, "views": 1, "auto": 1, "cheap": 2}[policy]
        convolved = {v for e in self.late if e.op in _CONVOLUTIONS for v in e.inputs()}

        def may(e: Equation) -> bool:
            if any(v in self.boundary for v in e.results()):
                return False
            if recompute_region(e.tags) is not None and self._pure(e):
                return True
            return self._rank(e) <= level and not (self._rank(e) == 2 and any(v in convolved for v in e.results()))

        return set(filter(may, self.trace.equations))

    def _boundary(self) -> set[Value]:
        """What leaves a checkpoint for other equations of the forward: saved if backward wants it, as in eager. Run
        again, it would take the whole forward before it along, and hold all of that at once."""
        region = {v: recompute_region(e.tags) for v, e in self.maker.items()}
        return {
            v
            for e in self.early - self.late
            for v in e.inputs()
            if region.get(v) is not None and region[v] != recompute_region(e.tags)
        }

    def _stored(self) -> set[Value]:
        """Values of the forward that are in memory whatever is fused: what library calls read and write, and what is
        read before such a call and again by what needs its result."""
        numbers = {e: i for i, e in enumerate(self.trace.equations)}
        above: dict[Equation, int] = {}  # all that an equation needs, as bits
        behind: dict[Equation, int] = {}  # all that some library call needs which the equation needs in turn
        stored = {*self.primals, *values_in(self.outputs)}
        for eqn in (e for e in self.trace.equations if e in self.early and e not in self.late):
            before = {self.maker[v] for v in eqn.inputs() if v in self.maker}
            above[eqn] = functools.reduce(int.__or__, (above[e] | 1 << numbers[e] for e in before), 0)
            passed = (behind[e] | (above[e] if _is_library(e) else 0) for e in before)
            behind[eqn] = functools.reduce(int.__or__, passed, 0)
            if _is_library(eqn):
                stored.update((*eqn.inputs(), *eqn.results()))
            stored |= {v for v in eqn.inputs() if v in self.maker and behind[eqn] >> numbers[self.maker[v]] & 1}
            sources = filter(self.maker.__contains__, map(self._copied, eqn.inputs()))
            self.passing[eqn] = [v for v in sources if behind[eqn] >> numbers[self.maker[v]] & 1]
        return stored

    def _copied(self, v: Value) -> Value:
        """What a value is a view or a cast of."""
        while v in self.maker and (is_view(self.maker[v].op) or self.maker[v].opname == "_to_copy"):
            v = self.maker[v].inputs()[0]
        return v

    def _parts(self) -> set[Value]:
        """Views of what a library wrote. Each keeps all of that in memory, and so do many: that is saved itself."""
        whole, parts = set[Value](), set[Value]()
        for eqn in self.trace.equations:
            if eqn not in self.early:
                continue
            if _is_library(eqn):
                whole.update(eqn.results())
            elif starts(eqn) and not whole.isdisjoint(eqn.inputs()):
                whole.update(eqn.results())
                parts.update(eqn.results())
        return parts

    def _pure(self, eqn: Equation) -> bool:
        return not has_effect(eqn)

    def _rank(self, eqn: Equation) -> int:
        """0: runs once anyway; 1: a view; 2: cheap arithmetic; 3: real work; 4: must not run twice."""
        if eqn not in self._ranks:
            self._ranks[eqn] = self._ranked(eqn)
        return self._ranks[eqn]

    def _ranked(self, eqn: Equation) -> int:
        if not self._pure(eqn):
            return 4
        if eqn not in self.early:
            return 0
        declared = rules(eqn.op)
        if declared is not None and declared.free or is_view(eqn.op) or self._gathers_input(eqn):
            return 1
        if rounds(eqn):
            return 3
        return 2 if declared is not None and declared.family in _ARITHMETIC or _gathers(eqn) else 3

    def _gathers_input(self, eqn: Equation) -> bool:
        """A part of a weight becomes the whole, or other ranks' keys pass by: kept, it would take the memory back that
        splitting it saved."""
        if is_collective(eqn, "permute"):
            return True
        if not is_collective(eqn, "all_gather"):
            return False
        (v,) = eqn.inputs()
        return v in self.given or (v in self.maker and self._gathers_input(self.maker[v]))

    def fit(self, budget: int) -> list[Value]:
        """The least recomputation that keeps the saved bytes within the budget, or the smallest save there is.

        Equal layers have equal prices. Where not all of them need to run again, those that do not are spread: what runs
        again between two of them is a short chain, and what backward holds of it at once is little.
        """
        pure = [e for e in self.trace.equations if self._pure(e)]
        price = {e: (flops(e) / max(1.0, sum(nbytes(v) for v in e.results())), str(e.op)) for e in pure}
        steps, base = sorted(set(price.values())), self.allowed("views")

        def up_to(step: int, but: set[Equation] = frozenset()) -> list[Value]:  # type: ignore[assignment]
            return self.cut(base | {e for e in pure if price[e] <= steps[step] and e not in but})

        cheapest = first_that_fits(len(steps), lambda i: self.bytes(up_to(i)) <= budget)
        if cheapest is None:
            return self.cut(set(pure))
        last = [e for e in pure if price[e] == steps[cheapest] and e in self.early and e in self.needed]
        fitting = [up_to(cheapest)]

        def again(count: int) -> bool:
            """This many of the dearest run again."""
            fitting.append(up_to(cheapest, _evenly(last, len(last) - count)))
            return self.bytes(fitting[-1]) <= budget

        first_that_fits(len(last), again)
        return max((saved for saved in fitting if self.bytes(saved) <= budget), key=self.bytes)

    # --- the cut ---

    def unchained(self, saved: list[Value], allowed: set[Equation]) -> tuple[list[Value], set[Equation]]:
        """What is saved, and may run again, if no layer is computed again from the one before: where that is no more.

        A residual stream is the sum of what layers gave. If these are saved, and the sums computed again, the first
        gradient, which wants the last sum, makes backward compute all sums before any layer is done with its own.
        """
        again = [e for e in self.halves.backward_equations(saved) if e not in self.late]
        anew = {v for e in again for v in e.results() if nbytes(v) >= LARGE}
        links = {e for e in again if not anew.isdisjoint(self.passing.get(e, ()))}
        if not links:
            return saved, allowed
        other = self.cut(allowed - links, AGAIN)
        fits = self.bytes(other) <= self.bytes(saved) * ALIKE
        return (other, allowed - links) if fits else (saved, allowed)

    def inside(self, saved: list[Value], allowed: set[Equation]) -> list[Value]:
        """What is saved if backward reads values inside of others that are saved anyway; it is not more."""
        users = self.trace.users()
        places = [item for v in saved for item in enclosed(v, self.maker).items()]
        held = {x: place for x, place in places if self._may_stay(x, users[x])}
        if not held:
            return saved
        wholes = {self.maker[place.whole] for place in held.values()}
        chosen = self.cut(allowed - wholes, AGAIN, held)
        fewer = [v for v in chosen if v not in held]
        if self.bytes(fewer) > self.bytes(saved):
            return saved
        # What a value lies in may lie in another one: that comes first.
        self.held = {v: held[v] for v in reversed(chosen) if v in held}
        return fewer

    def uncopied(self, saved: list[Value]) -> list[Value]:
        """What is saved, without copies of what is saved too, such as the part of an image that a convolution
        wants by itself: backward copies it again."""
        kept = set(saved) - self.given
        return [v for v in saved if not self._copies(v, kept)]

    def _copies(self, v: Value, kept: set[Value]) -> bool:
        if v not in self.maker or v in self.boundary or v in values_in(self.outputs) or nbytes(v) < COPIED:
            return False
        if self.maker[v].opname != "clone":
            return False
        (x,) = self.maker[v].inputs()
        while x not in kept and x in self.maker and is_view(self.maker[x].op):
            x = self.maker[x].inputs()[0]
        return x in kept

    def _may_stay(self, x: Value, users: list[Equation]) -> bool:
        """A large value of the forward that is not alive anyway, has no place on a mesh, which a slice would lose, and
        that no library reads in backward."""
        if x not in self.maker or recompute_region(self.maker[x].tags) is not None or nbytes(x) < LARGE:
            return False
        if x in values_in(self.outputs) or x in self.boundary or x.tensor.placement is not None:
            return False
        return not any(e in self.late and _is_library(e) for e in users)

    def cut(self, allowed: set[Equation], again: float = 0.0, held: Mapping[Value, Place] = NOTHING) -> list[Value]:
        """Values to save so that every late equation can run; computing one again costs `again` times its bytes. So
        do those that are `held`: what they lie in is saved."""
        edges: dict[Hashable, dict[Hashable, float]] = {}
        source, sink = "source", "sink"

        def edge(a: Hashable, b: Hashable, capacity: float) -> None:
            edges.setdefault(a, {})[b] = edges.get(a, {}).get(b, 0) + capacity

        read_late = {v for e in self.late if e in self.needed for v in e.inputs()}
        read_late |= {v for v in values_in(self.grads)}
        read_late |= {place.whole for place in held.values()}
        outputs = set(values_in(self.outputs))
        for eqn in self.trace.equations:
            if eqn in self.late or eqn not in self.needed:
                continue
            for v in eqn.results():
                weight = self._weight(v, alive=v in outputs)
                if eqn in allowed and self._rank(eqn) == 2 and v not in self.stored:
                    weight *= FUSED
                inside = recompute_region(eqn.tags) is not None and v not in self.boundary
                if eqn in allowed and (inside or (v in self.parts and v not in outputs)):
                    weight = INFINITE
                if v in held:
                    weight = again * nbytes(v) + 1.0
                edge((v, "in"), (v, "out"), weight)
                if eqn in allowed:
                    for x in dict.fromkeys(eqn.inputs()):
                        edge((x, "out"), (v, "in"), INFINITE)
                    if again and self._rank(eqn) > 1:
                        edge(source, (v, "in"), again * nbytes(v))
                    if not eqn.inputs():
                        continue  # made from nothing: run again at no cost in memory
                else:
                    edge(source, (v, "in"), INFINITE)
        compared = self._compared(read_late)
        for v in self.primals:
            edge(source, (v, "in"), INFINITE)
            edge((v, "in"), (v, "out"), self._weight(v, alive=v not in compared))
        for v in read_late:
            if v in self.maker and self.maker[v] in self.late or v in self.cts or v in self.trace.constants:
                continue
            edge((v, "out"), sink, INFINITE)
        reached = min_cut(edges, source, sink)
        order = [*self.primals, *(v for e in self.trace.equations for v in e.results())]
        return [v for v in order if (v, "in") in reached and (v, "out") in edges and (v, "out") not in reached]

    def _compared(self, read_late: set[Value]) -> set[Value]:
        """Inputs of which backward wants nothing but masks. Eager keeps those, so that the input may be written before
        backward runs, and a mask is few bytes: it is kept unless the input is fewer."""
        wanted = {v for v in read_late if not _is_mask(v)}
        for eqn in reversed(self.trace.equations):
            if eqn in self.needed and eqn not in self.late and any(v in wanted for v in eqn.results()):
                wanted.update(eqn.inputs())
        return {v for v in self.primals if v not in wanted and v not in read_late and not _is_mask(v)}

    def _weight(self, v: Value, alive: bool) -> float:
        size = nbytes(v) + 1.0 if isinstance(v.type, TensorType) else 1.0
        return size * ALIVE if alive else size


def _evenly(equations: list[Equation], count: int) -> set[Equation]:
    """So many of them, evenly far from one another and from both ends."""
    return {equations[(2 * i + 1) * len(equations) // (2 * count)] for i in range(count)}


def _is_mask(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.dtype is torch.bool


def _is_library(eqn: Equation) -> bool:
    """What kernels are not made of: products, convolutions, attention and the like."""
    declared = rules(eqn.op)
    fused = declared is not None and (declared.free or declared.family in _ARITHMETIC or declared.family in _REDUCTIONS)
    return not fused and not is_view(eqn.op) and not _gathers(eqn)


def _gathers(eqn: Equation) -> bool:
    """Rows of something smaller, each read several times: nodes at the ends of edges. Read again, they come from a
    cache for the most part; kept, they are as many bytes as what is made of them."""
    return eqn.opname in _GATHERS and nbytes(eqn.inputs()[0]) < nbytes(eqn.out)


# What these read is saved, not computed again: between convolutions moving activations is much of the time, and the
# kernel that writes one again moves as much as the one that made it.
_CONVOLUTIONS = frozenset(
    (torch.ops.aten.convolution_backward.default, torch.ops.aten.max_pool2d_with_indices_backward.default)
)
_GATHERS = ("index", "index_select")
_REDUCTIONS = frozenset(("reduction", "norm", "loss"))
# One pass over the data, no more than a fused kernel does on the way. What a reduction gives is small: it is saved.
_ARITHMETIC = frozenset(
    ("unary", "binary", "pointwise", "step", "predicate", "copy", "constructor", "view", "shape", "computed random")
)
