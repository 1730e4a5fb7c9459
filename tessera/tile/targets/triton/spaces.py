"""The shapes of blocks, and the variables that say where a block lies.

A `Space` is an order of dims; a value in it has one dimension per dim, of length one where it does not vary, so that
broadcasting by axis is broadcasting. Most kernels have one space. A matrix product needs three: the result's (m, n),
and (m, r) and (r, n) for its operands. Only positions along r differ between them; `Places` keeps a variable for each.
Lines go to the start of the kernel, or into the loop that is being written if they vary along its dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.tile.dialect.index import Index, name
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.targets.triton.layout import Dim, Layout, Run, run_name, unwrap
from tessera.tile.targets.triton.names import Namer, grouped, render

Dims = frozenset[Dim]


@dataclass(frozen=True)
class Space:
    dims: tuple[Dim, ...]
    suffix: str = ""

    def shape(self, varying: Dims) -> str:
        return f"[{', '.join(str(d.block) if d in varying else '1' for d in self.dims)}]"

    def expand(self, vector: str, dim: Dim) -> str:
        """A vector along one dim as a block of this space."""
        if len(self.dims) == 1:
            return vector
        return f"{vector}[{', '.join(':' if d is dim else 'None' for d in self.dims)}]"


@dataclass(frozen=True)
class Val:
    """A value in the text: its name or literal, and the dims it varies over."""

    text: str
    dims: Dims = frozenset()
    literal: bool = False


def short_name(axes: tuple[str, ...]) -> str:
    """`ij` for the axes i and j, `row_col` for row and col."""
    return ("" if all(len(a) == 1 for a in axes) else "_").join(axes)


class Places:
    def __init__(self, kernel: KernelOp, layout: Layout, wide: bool, namer: Namer) -> None:
        self.layout, self.wide, self.namer = layout, wide, namer
        self.axes = frozenset(kernel.axis_names())
        self.single = {a.axis.data: 0 for a in kernel.axes if a.size.expr.constant == 1}
        self.symbols = {s.data: namer.fresh(s.data) for s in kernel.symbol_names}
        self.start: list[str] = []  # lines of the kernel's start
        self.inner: list[str] | None = None  # lines of the loop that is being written
        self.starts: dict[tuple[str, ...], str] = {}  # where blocks start, of dims whose positions may not be needed
        self.moving: Dim | None = None  # the dim it runs along
        self._outer_names: dict[tuple[str, str], str] = {}
        self._inner_names: dict[tuple[str, str], str] = {}

    # --- sizes ---

    def size(self, expr: Index) -> str:
        return render(expr, self.symbols.__getitem__)

    def _grouped(self, expr: Index) -> str:
        return grouped(expr, self.symbols.__getitem__)

    # --- lines and variables ---

    def define(self, key: tuple[str, str], wanted: str, text: Callable[[], str], dim: Dim) -> str:
        """The variable for `key`, written down the first time it is needed; in the loop, if that moves `dim`."""
        inside = dim == self.moving
        names = self._inner_names if inside else self._outer_names
        if key not in names:
            value = text()
            names[key] = self.namer.fresh(wanted)
            (self.inner if inside and self.inner is not None else self.start).append(f"{names[key]} = {value}")
        return names[key]

    def forget(self, dim: Dim) -> None:
        """Positions along a dim are not known any more: another block of it comes."""
        for key in list(self._outer_names):
            if set(key[0].removesuffix(" in").split()) <= set(dim.axes):
                del self._outer_names[key]

    def enter(self, lines: list[str], dim: Dim, names: dict[tuple[str, str], str] | None = None) -> None:
        """Lines go into a loop; `names` are the variables of one of several blocks that a step has, as known so far."""
        self.inner, self.moving, self._inner_names = lines, dim, {} if names is None else names

    def leave(self) -> None:
        self.namer.release(self._inner_names.values())
        self.inner = self.moving = None

    def arange(self, n: int) -> str:
        return f"tl.arange(0, {n})" + (".to(tl.int64)" if self.wide else "")

    def position(self, dim: Dim, space: Space, first: str = "") -> str:
        """The variable along a dim; `first` says where its block starts, when it is defined."""
        suffix = space.suffix if dim.reduce else ""
        first = first or self.starts.get(dim.axes, "")

        def text() -> str:
            vector = f"{first} + {self.arange(dim.block)}" if first else self.arange(dim.block)
            return space.expand(f"({vector})" if first and len(space.dims) > 1 else vector, dim)

        return self.define((run_name(dim.axes), suffix), short_name(dim.axes) + suffix, text, dim)

    def set_position(self, dim: Dim, text: str) -> None:
        """Where one program stands along a dim of block one."""
        self.define((run_name(dim.axes), ""), short_name(dim.axes), lambda: text, dim)

    def inside(self, dim: Dim, space: Space) -> str:
        """The mask of positions that exist."""
        at = self.position(dim, space)
        suffix = space.suffix if dim.reduce else ""
        key = (f"{run_name(dim.axes)} in", suffix)
        return self.define(key, f"{at}_in", lambda: f"{at} < {self.size(dim.size)}", dim)

    def run(self, dim: Dim, run: Run, space: Space) -> str:
        """The variable of a run of a dim's axes."""
        if run.axes == dim.axes:
            return self.position(dim, space)
        whole = self.position(dim, space)

        def text() -> str:
            part = whole if run.inner.constant == 1 else f"{whole} // {self._grouped(run.inner)}"
            return part if run.first else f"{part} % {self._grouped(run.size)}"

        suffix = space.suffix if dim.reduce else ""
        return self.define((run_name(run.axes), suffix), short_name(run.axes) + suffix, text, dim)

    # --- offsets ---

    def offset(self, expr: Index, indices: Sequence[tuple[str, Dims]], space: Space) -> tuple[str, Dims]:
        """An index expression as Python over this space, and the dims it varies over."""
        expr = expr.substitute(self.single)
        names: dict[str, str] = {f"_{i}": text for i, (text, _) in enumerate(indices)}
        varying: set[Dim] = set()
        wholes: dict[str, tuple[str, int]] = {}
        rank: dict[str, int] = {f"_{i}": 3 if dims else 1 for i, (_, dims) in enumerate(indices)}
        for i, (_, dims) in enumerate(indices):
            if f"_{i}" in expr.names():
                varying |= dims
        for dim in self.layout.dims:
            expr, runs = dim.rewrite(expr, self.axes)
            for run in runs:
                names[run_name(run.axes)] = self.run(dim, run, space)
                if not run.first and run.inner.constant == 1 and run.size.constant:
                    wholes[run_name(run.axes)] = (run_name(dim.axes), run.size.constant)
                    names[run_name(dim.axes)] = self.position(dim, space)
                    rank[run_name(dim.axes)] = 1 + dim.tensor + dim.reduce
                rank[run_name(run.axes)] = 1 + dim.tensor + dim.reduce
                if dim.tensor:
                    varying.add(dim)
        names |= self.symbols
        text = render(unwrap(expr, wholes), names.__getitem__, self.symbols.__contains__, lambda n: rank.get(n, 0))
        return text, frozenset(varying)

    def axis(self, axis: str, space: Space) -> tuple[str, Dims]:
        return self.offset(name(axis), (), space)
