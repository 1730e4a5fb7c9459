"""A sum of many small products is one product.

In: a trace. Out: the same program, where on a GPU `x1 @ y1 + x2 @ y2 + …` is a product of the operands side by side,
and sums of columns are summed as one. A weight that is used step by step, as a recurrent cell's is, has such a
gradient: two launches a step and weight, whose operands take less time to copy. Such a sum is also rounded a few times,
not at every step.

Until a product is computed its operands are held, where step by step each step's would be freed. So a sum is several
products: one of the first step, and each of as many steps as are done before it, which have freed by then what forward
saved of them. Each stands behind the last of its steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial, reduce

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.starts import has_known_sizes
from tessera.ir.trace import Trace
from tessera.machines import machine_of

DEVICES = ("cuda",)  # where a launch takes longer than such a product
COPIES = 2  # launches: of each operand


def sum_products(trace: Trace) -> Trace:
    """Join the products of a sum where that pays."""
    return _Sums(trace).run()


class _Sums:
    def __init__(self, trace: Trace) -> None:
        self.rewrite = Rewrite(trace)
        self.places = {v: k for k, eqn in enumerate(trace.equations) for v in eqn.results()}
        self.sums: dict[Value, tuple[list[Value], dict[str, list[Value]]]] = {}  # a sum -> its terms, those that join
        self.due: dict[Value, tuple[str, Sequence[Value]]] = {}  # the last term of a group -> the group
        self.parts: dict[Value, Value] = {}  # the last term of a group -> the group's sum
        self.joined: dict[tuple[int, tuple[Value, ...]], Value] = {}  # what lies side by side -> all of it

    def run(self) -> Trace:
        for eqn in self.rewrite.trace.equations:
            if _adds(eqn) and not self.inner(eqn.out):
                self.plan(eqn)
        if not self.sums:
            return self.rewrite.trace
        for eqn in self.rewrite:
            last = eqn.outputs[0]
            if last in self.due:
                self.rewrite.keep(eqn)
                with self.rewrite.at(eqn):
                    self.parts[last] = self.part(*self.due[last])
            elif last in self.sums:
                self.rewrite.replace(eqn, partial(self.written, *self.sums[last]))
        return self.rewrite.finish()

    def plan(self, eqn: Equation) -> None:
        terms = list(self.terms(eqn))
        kinds = {name: [t for t in terms if self.is_one(t, name)] for name in ("mm", "sum")}
        chosen = {name: sorted(found, key=self.places.get) for name, found in kinds.items() if self.pays(found)}  # type: ignore[arg-type]
        if chosen:
            self.sums[eqn.out] = terms, chosen
            self.due |= {group[-1]: (name, group) for name, found in chosen.items() for group in grouped(found)}

    def inner(self, v: Value) -> bool:
        """Whether a sum is only a term of another."""
        reader = self.rewrite.reader(v)
        return reader is not None and _adds(reader) and reader.out.type == v.type

    def terms(self, eqn: Equation) -> Iterator[Value]:
        """What a sum and the sums in it add up."""
        stack = list(reversed(eqn.inputs()))
        while stack:
            v = stack.pop()
            made = self.rewrite.makers.get(v)
            if made is not None and _adds(made) and self.inner(v):
                stack.extend(reversed(made.inputs()))
            else:
                yield v

    def is_one(self, v: Value, name: str) -> bool:
        """A product, or the sum of a matrix's columns, that is for this sum alone."""
        made = self.rewrite.maker(v, name)
        if made is None or self.rewrite.reader(v) is None or not all(map(has_known_sizes, (v, *made.inputs()))):
            return False
        return (name == "mm" or _sums_columns(made)) and all(x.dtype == v.dtype for x in made.inputs())

    def pays(self, terms: Sequence[Value]) -> bool:
        """Launches that go take longer than the copies."""
        if not terms or terms[0].tensor.device.type not in DEVICES or len({t.type for t in terms}) != 1:
            return False
        machine = machine_of(terms[0].tensor.device)
        moved = 2 * sum(x.nbytes() for t in terms for x in self.rewrite.makers[t].inputs())
        left = sum(1 + COPIES * (len(group) > 1) for group in grouped(terms))
        return (len(terms) - left) * machine.launch > moved / machine.bandwidth

    def written(self, terms: Sequence[Value], chosen: dict[str, list[Value]], _: Equation) -> Value:
        left = [t for t in terms if not any(t in found for found in chosen.values())]
        new = [self.parts[group[-1]] for found in chosen.values() for group in grouped(found)]
        return reduce(aten.add, [*left, *new])

    def part(self, name: str, group: Sequence[Value]) -> Value:
        if len(group) == 1:
            return group[0]
        return self.product(group) if name == "mm" else self.total(group)

    def product(self, terms: Sequence[Value]) -> Value:
        lefts, rights = zip(*(self.operands(t) for t in terms), strict=True)
        turned = [self.rewrite.maker(x, "t") for x in lefts]
        if all(turned):  # rows lie side by side more easily than columns
            rows = [eqn.inputs()[0] for eqn in turned if eqn is not None]
            return aten.mm(aten.t(self.side_by_side(rows, 0)), self.side_by_side(rights, 0))
        return aten.mm(self.side_by_side(lefts, 1), self.side_by_side(rights, 0))

    def total(self, terms: Sequence[Value]) -> Value:
        made = [self.rewrite.makers[t] for t in terms]
        rows = [self.operands(t)[0] for t in terms]
        return aten.sum(self.side_by_side(rows, 0), *made[0].args[1:])

    def operands(self, v: Value) -> list[Value]:
        """What makes a term, as it is called by now."""
        return [self.rewrite.renamed.get(x, x) for x in self.rewrite.makers[v].inputs()]

    def side_by_side(self, values: Sequence[Value], dim: int) -> Value:
        key = dim, tuple(values)
        if key not in self.joined:
            self.joined[key] = aten.cat(list(values), dim)
        return self.joined[key]


def grouped(terms: Sequence[Value]) -> list[Sequence[Value]]:
    """Each group as long as all before it."""
    groups, done = [], 0
    while done < len(terms):
        groups.append(terms[done : done + max(done, 1)])
        done += len(groups[-1])
    return groups


def _sums_columns(eqn: Equation) -> bool:
    args, options = eqn.bound()
    dims = args[1] if len(args) > 1 else None  # a sum of everything has none
    return args[0].ndim == 2 and isinstance(dims, (list, tuple)) and list(dims) == [0] and not any(options.values())  # type: ignore[union-attr]


def _adds(eqn: Equation) -> bool:
    """The sum of two different tensors of one type."""
    inputs = eqn.inputs()
    plain = eqn.opname == "add" and not eqn.kwargs and len(eqn.args) == 2 and len(inputs) == 2
    return plain and all(v.type == eqn.out.type for v in inputs)
