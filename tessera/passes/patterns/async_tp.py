"""Products and the exchanges beside them, in pieces that overlap (async tensor parallelism).

    g = dist.all_gather(x, 1, "tp")              x_1 = dist.permute(x, "tp", 1)
    y = aten.linear(g, w)                   -->  y_0 = aten.linear(x, w)
                                                 y_1 = aten.linear(x_1, w)
                                                 y = dist.in_order([y_0, y_1], 1, "tp")

    y = aten.linear(x, w)                        x_1 = dist.slice(x, 1, "tp", 1)
    s = dist.reduce_scatter(y, 1, "tp")     -->  y_1 = dist.permute(aten.linear(x_1, w), "tp", 1)
                                                 x_0 = dist.slice(x, 1, "tp")
                                                 s = aten.add(aten.linear(x_0, w), y_1)

In: one rank's program, and the axes whose exchanges are cut. Out: the same values and bytes, in as many pieces as an
axis has ranks, and a line for each exchange: which products were cut, or why none was. While one piece is multiplied
the next is on its way. All products of a gathered value are cut together, each piece in turn; several products that are
added up before they are scattered are cut together too. What else reads a gathered value gets it joined, later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tessera.ir.builder import Builder
from tessera.ir.dist import Collective, is_collective, on
from tessera.ir.equation import Equation, Value, short_path
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.passes.patterns.pieces import Pieces, blocks_before, rows_of
from tessera.util.names import names

RESHAPES = names("reshape view _unsafe_view flatten")


@dataclass
class _Gather:
    """A gather whose products are cut."""

    eqn: Equation
    products: list[Equation]
    views: dict[Value, Equation]  # matrices of its rows
    pieces: list[Value] = field(default_factory=list)  # of this rank and of those before it, in that order


def async_tp(trace: Trace, axes: Collection[str]) -> tuple[Trace, tuple[str, ...]]:
    """The program in pieces, and what there is to say."""
    if not any(_is_cut(eqn, axes, "all_gather", "reduce_scatter") for eqn in trace.equations):
        return trace, ()
    cut = _Cut(trace, axes)
    return cut.run(), tuple(cut.said)


def _is_cut(eqn: Equation, axes: Collection[str], *kinds: str) -> bool:
    return is_collective(eqn, *kinds) and eqn.args[2] in axes and _ranks(eqn) > 1


def _ranks(eqn: Equation) -> int:
    assert isinstance(eqn.op, Collective)
    return eqn.op.mesh.size(eqn.args[2])  # type: ignore[arg-type]


class _Cut:
    def __init__(self, trace: Trace, axes: Collection[str]) -> None:
        self.trace, self.axes, self.builder = trace, axes, Builder.over(trace)
        self.users, self.makers, self.kept = trace.users(), trace.makers(), set(trace.results())
        self.place = {eqn: i for i, eqn in enumerate(trace.equations)}
        self.said: list[str] = []
        self.gathers: dict[Equation, _Gather] = {}
        self.group: dict[Equation, _Gather] = {}  # of a product, the gather that it is cut with
        self.scatters: dict[Equation, set[Equation]] = {}  # with what goes into their pieces
        self.later: dict[Value, Callable[[], None]] = {}  # values that are made when somebody reads them
        self.done: set[Equation] = set()

    def run(self) -> Trace:
        for eqn in self.trace.equations:
            if _is_cut(eqn, self.axes, "all_gather"):
                self.plan_gather(eqn)
        for eqn in self.trace.equations:
            if _is_cut(eqn, self.axes, "reduce_scatter"):
                self.plan_scatter(eqn)
        self.done.update(*self.scatters.values())
        for eqn in self.trace.equations:
            self.equation(eqn)
        self.need(self.trace.results())
        return self.trace.with_(equations=tuple(self.builder.equations))

    def equation(self, eqn: Equation) -> None:
        if eqn in self.done:
            return
        self.done.add(eqn)
        if eqn in self.gathers:
            self.gather(self.gathers[eqn])
        elif eqn in self.scatters:
            self.scatter(eqn)
        elif eqn in self.group:
            self.products(eqn)
        else:
            self.need(eqn.inputs())
            self.builder.append(eqn)

    def need(self, values: Collection[Value]) -> None:
        for v in values:
            if v in self.later:
                self.later.pop(v)()

    def pieces_of(self, eqn: Equation) -> Pieces:
        assert isinstance(eqn.op, Collective)
        return Pieces(self.builder, on(eqn.op.mesh), eqn.args[2])  # type: ignore[arg-type]

    def gives(self, v: Value) -> None:
        """The last equation gives a value that the program knows."""
        self.builder.equations[-1] = self.builder.equations[-1].with_(outputs=(v,))

    def say(self, eqn: Equation, what: str, at: Equation | None = None) -> None:
        source = (at or eqn).source if (at or eqn).source.file else eqn.source
        where = f" at {short_path(source.file)}:{source.line}" if source.file else ""
        self.said.append(f"{eqn.args[2]}: {eqn.op.name}{where} {what}")  # type: ignore[union-attr]

    # --- gathers ---

    def plan_gather(self, eqn: Equation) -> None:
        g, dim = eqn.out, eqn.args[1]
        if (why := _unfit(eqn.inputs()[0], g, dim, _ranks(eqn))) is not None:  # type: ignore[arg-type]
            self.say(eqn, f"is not cut: {why}")
            return
        views = {e.out: e for e in self.users.get(g, ()) if self.is_matrix(e, g)}
        readers = [e for v in (g, *views) for e in self.users.get(v, ())]
        products = [e for e in readers if rows_of(e) in (g, *views) and _row_major(e.out)]
        products = sorted({e for e in products if e.inputs().count(rows_of(e)) == 1}, key=self.place.__getitem__)  # type: ignore[arg-type]
        if not products:
            self.say(eqn, "is not cut: no product reads its rows")
            return
        self.gathers[eqn] = gather = _Gather(eqn, products, views)
        self.group.update(dict.fromkeys(products, gather))
        count = f"{len(products)} products" if len(products) > 1 else "a product"
        self.say(eqn, f"and {count} of its rows are cut into {_ranks(eqn)} pieces", products[0])

    def is_matrix(self, eqn: Equation, g: Value) -> bool:
        """A view of a gathered value as rows of its last dimension."""
        if eqn.opname not in RESHAPES or eqn.args[0] is not g or g.ndim < 3:
            return False
        return eqn.out.ndim == 2 and str(eqn.out.shape[1]) == str(g.shape[-1]) and _row_major(eqn.out)

    def gather(self, gather: _Gather) -> None:
        eqn, pieces = gather.eqn, self.pieces_of(gather.eqn)
        self.need(eqn.inputs())
        x, dim = eqn.inputs()[0], int(eqn.args[1])  # type: ignore[arg-type]
        with self.builder.at(eqn):
            gather.pieces = [x, *(pieces.permute(x, by) for by in range(1, pieces.ranks))]

        def join() -> None:
            with self.builder.at(eqn):
                pieces.in_order(gather.pieces, dim)
            self.gives(eqn.out)

        def view(reshape: Equation) -> Callable[[], None]:
            def append() -> None:
                self.need(reshape.inputs())
                self.builder.append(reshape)

            return append

        self.later[eqn.out] = join
        self.later.update((v, view(reshape)) for v, reshape in gather.views.items())
        self.done.update(gather.views.values())

    def products(self, first: Equation) -> None:
        """All products of a gathered value whose other operands can be had now, piece by piece."""
        gather = self.group[first]
        together = [first]
        for other in gather.products:
            if other in self.done:
                continue
            before = self.before(other, gather)
            if before is not None:
                for eqn in before:
                    self.equation(eqn)
                together.append(other)
                self.done.add(other)
        pieces, g = self.pieces_of(gather.eqn), gather.eqn.out
        dim, results = int(gather.eqn.args[1]), dict[Equation, list[Value]]()  # type: ignore[arg-type]
        for product in together:
            self.need([v for v in product.inputs() if v is not rows_of(product)])
        for piece in gather.pieces:
            for product in together:
                with self.builder.at(product):
                    rows = piece if rows_of(product) is g else pieces.as_matrix(piece)
                    results.setdefault(product, []).append(pieces.product(product, rows))
        for product in together:
            with self.builder.at(product):
                if rows_of(product) is g:
                    pieces.in_order(results[product], dim)
                else:
                    pieces.rows_in_order(results[product], blocks_before(g, dim))
            self.gives(product.out)

    def before(self, product: Equation, gather: _Gather) -> list[Equation] | None:
        """What a product waits for beside its rows, in order; None where that waits for the gathered value itself."""
        rows, wanted = rows_of(product), set[Equation]()
        stack = [v for v in product.inputs() if v is not rows]
        while stack:
            eqn = self.makers.get(stack.pop())
            if eqn is None or eqn in self.done or eqn in wanted:
                continue
            if eqn in self.group or self.place[eqn] < self.place[gather.eqn] or self.reads(eqn, gather):
                return None
            wanted.add(eqn)
            stack += eqn.inputs()
        return sorted(wanted, key=self.place.__getitem__)

    def reads(self, eqn: Equation, gather: _Gather) -> bool:
        return any(v is gather.eqn.out or v in gather.views or v in self.later for v in eqn.inputs())

    # --- scattered sums ---

    def plan_scatter(self, eqn: Equation) -> None:
        (x,), dim, inside = eqn.inputs(), int(eqn.args[1]), set[Equation]()  # type: ignore[arg-type]
        why = _unfit(eqn.out, x, dim, _ranks(eqn)) or (None if _row_major(eqn.out) else "its result is not row-major")
        products = [] if why else self.summed(x, dim, inside)
        if not products:
            self.say(eqn, f"is not cut: {why or 'no product makes what is summed'}", self.makers.get(x))
            return
        self.scatters[eqn] = inside
        count = f"{len(products)} products" if len(products) > 1 else "a product"
        self.say(eqn, f"and {count} before it are cut into {_ranks(eqn)} pieces", products[0])

    def summed(self, v: Value, dim: int, inside: set[Equation]) -> list[Equation]:
        """The products that a sum is made of, and in `inside` what is computed for nothing else."""
        eqn = self.makers.get(v)
        if eqn is None or eqn in self.group or v in self.kept or len(self.users[v]) != 1 or not _row_major(v):
            return []
        if rows_of(eqn) is not None and v.ndim > dim + 1:
            products = [eqn]
        elif _adds(eqn):
            products = [p for x in eqn.inputs() for p in self.summed(x, dim, inside)]
        elif (product := self.product_under(eqn)) is not None:
            inside.add(product)
            products = [product]
        else:
            return []
        if products:
            inside.add(eqn)
        return products

    def product_under(self, eqn: Equation) -> Equation | None:
        """The product of matrices that a reshape gives more dimensions."""
        if eqn.opname not in RESHAPES:
            return None
        x = eqn.inputs()[0]
        product = self.makers.get(x)
        if product is None or product in self.group or x in self.kept or len(self.users[x]) != 1 or x.ndim != 2:
            return None
        same = str(x.shape[1]) == str(eqn.out.shape[-1])
        return product if rows_of(product) is not None and same else None

    def scatter(self, eqn: Equation) -> None:
        (x,), dim, pieces = eqn.inputs(), int(eqn.args[1]), self.pieces_of(eqn)  # type: ignore[arg-type]
        inside = self.scatters[eqn]
        self.need([v for e in (*inside, eqn) for v in e.inputs() if self.makers.get(v) not in inside])
        come = []
        for by in range(1, pieces.ranks):
            part = self.part(x, dim, by, pieces, inside)
            with self.builder.at(eqn):
                come.append(pieces.permute(part, by))
        total = self.part(x, dim, 0, pieces, inside)
        with self.builder.at(eqn):
            for piece in come:
                total = pieces.add(total, piece)
        self.gives(eqn.out)

    def part(self, v: Value, dim: int, by: int, pieces: Pieces, inside: set[Equation]) -> Value:
        """A rank's chunk of what is summed."""
        eqn = self.makers.get(v)
        if eqn is None or eqn not in inside:
            return pieces.slice(v, dim, by)
        if _adds(eqn):
            a, b = (self.part(x, dim, by, pieces, inside) for x in eqn.inputs())
            with self.builder.at(eqn):
                return pieces.add(a, b)
        with self.builder.at(eqn):
            rows = rows_of(eqn)
            if rows is not None:
                return pieces.product(eqn, pieces.slice(rows, dim, by))
            product = self.makers[eqn.inputs()[0]]
            rows = rows_of(product)
            assert rows is not None
            out = pieces.product(product, pieces.slice_rows(rows, blocks_before(v, dim), by))
            sizes = [int(n) // (pieces.ranks if d == dim else 1) for d, n in enumerate(v.shape)]
            return pieces.reshape(out, sizes)


def _row_major(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.is_row_major


def _adds(eqn: Equation) -> bool:
    """A sum of two values of one form."""
    a, b = (*eqn.args[:2], None, None)[:2]
    both = isinstance(a, Value) and isinstance(b, Value) and a is not b
    return both and eqn.opname == "add" and not eqn.kwargs and a.tensor.key()[:2] == b.tensor.key()[:2]  # type: ignore[union-attr]


def _unfit(part: Value, whole: Value, dim: int, ranks: int) -> str | None:
    """Why an exchange cannot be cut, whatever stands beside it."""
    if not all(type(n) is int for n in (*part.shape, *whole.shape)):
        return "sizes are not known"
    if int(part.shape[dim]) * ranks != int(whole.shape[dim]):
        return f"{ranks} ranks do not divide it"
    if dim == whole.ndim - 1:
        return "rows are not what is exchanged"
    return None
