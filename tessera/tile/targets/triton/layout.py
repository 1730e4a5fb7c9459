"""Where the axes of a kernel go: program ids, dimensions of blocks, and how an offset is written over them.

A schedule's blocks are named by an axis ("j") or by several neighbours that are indexed as one ("i j"). Each becomes a
`Dim`. Parallel dims share out the grid; a dim whose block is larger than one is a dimension of the block as well.
A sequential axis has no program ids: every program goes all along it.
Neighbouring parallel axes of block one are joined, so that an offset over them needs no division where their strides
allow. Reading an offset off a joined dim is `Dim.rewrite`; it divides only where strides do not fit together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tessera.tile.dialect.index import Index, Quotient, name
from tessera.tile.dialect.ops import PARALLEL, IotaOp, KernelOp, LoadOp, StoreOp
from tessera.tile.schedules.schedule import Schedule, inner_axis, reduced_axis
from tessera.util.errors import OptionError
from tessera.util.powers import power_of_two

LARGEST = 2**31 - 2**17  # a 32-bit position, with room for the last block


@dataclass(frozen=True)
class Run:
    """Neighbouring axes of one dim, read as a single number: `dim // inner % size`."""

    axes: tuple[str, ...]
    inner: Index  # how many positions of the dim one step of this run spans
    size: Index
    first: bool  # nothing stands before it, so the remainder can be left out


@dataclass(frozen=True)
class Dim:
    axes: tuple[str, ...]
    sizes: tuple[Index, ...]
    block: int
    reduce: bool = False

    @property
    def size(self) -> Index:
        return product(self.sizes)

    @property
    def tensor(self) -> bool:
        """Whether blocks have a dimension for it."""
        return self.reduce or self.block > 1

    @property
    def masked(self) -> bool:
        """Whether the last block reaches past the end."""
        size = self.size.constant
        return self.block > 1 and (size is None or size % self.block != 0)

    @property
    def steps(self) -> Index:
        return ceil_div(self.size, self.block)

    def run(self, first: int, last: int) -> Run:
        inner = product(self.sizes[last + 1 :])
        return Run(self.axes[first : last + 1], inner, product(self.sizes[first : last + 1]), first == 0)

    def rewrite(self, expr: Index, axes: frozenset[str]) -> tuple[Index, list[Run]]:
        """`expr` over runs of this dim instead of its axes, and those runs. `axes` are all axes of the kernel."""
        if len(self.axes) == 1 or not set(self.axes) & expr.names():
            single = [self.run(0, 0)] if self.axes[0] in expr.names() else []
            return expr, single
        strides = [expr.stride(a) for a in self.axes]
        runs: list[tuple[int, int]] = []
        for at in range(len(self.axes)):
            if runs and self._joins(strides[runs[-1][1]], strides[at], self.sizes[at], axes):
                runs[-1] = (runs[-1][0], at)
            else:
                runs.append((at, at))
        used: list[Run] = []
        for first, last in runs:
            stride = strides[last]
            if stride is not None and stride.constant == 0:
                expr = expr.substitute({a: 0 for a in self.axes[first : last + 1]})
                continue
            used.append(self.run(first, last))
            if last > first:
                zero: Mapping[str, Index | int] = {a: 0 for a in self.axes[first : last + 1]}
                assert stride is not None
                expr = expr.substitute(zero) + name(run_name(used[-1].axes)) * stride
        return expr, used

    @staticmethod
    def _joins(outer: Index | None, inner: Index | None, size: Index, axes: frozenset[str]) -> bool:
        if outer is None or inner is None or (outer.names() | inner.names()) & axes:
            return False
        return outer == inner * size


def unwrap(expr: Index, wholes: Mapping[str, tuple[str, int]]) -> Index:
    """(x % 128 + 64) % 64 --> (x + 64) % 64: a remainder inside another that its size divides says nothing.

    `wholes` maps a name that stands for `whole % size` to both. Triton sees fewer contiguous elements through two.
    """
    total = Index(())
    for factors, c in expr.terms:
        part = Index.of(c)
        for atom in factors:
            if not isinstance(atom, Quotient):
                part = part * name(atom.name)
                continue
            left = unwrap(atom.left, wholes)
            modulus = atom.right.constant
            if atom.kind == "%" and modulus:
                for text, (whole, size) in wholes.items():
                    stride = left.stride(text)
                    step = 0 if stride is None or stride.constant is None else stride.constant
                    if step > 0 and step * size % modulus == 0:  # a negative step would take it below zero
                        left = left.substitute({text: name(whole)})
            part = part * Index((((Quotient(atom.kind, left, atom.right),), 1),))
        total = total + part
    return total


def run_name(axes: tuple[str, ...]) -> str:
    """The name of a run inside index expressions; no axis or symbol has a space in its name."""
    return " ".join(axes)


def product(sizes: tuple[Index, ...]) -> Index:
    total = Index.of(1)
    for size in sizes:
        total = total * size
    return total


def ceil_div(size: Index, block: int) -> Index:
    return size if block == 1 else (size + (block - 1)) // block


@dataclass(frozen=True)
class Layout:
    parallel: tuple[Dim, ...]  # in the kernel's order; the last one varies fastest over program ids
    reduced: Dim | None
    sequential: Dim | None = None  # a parallel axis that every program loops along
    inner: Dim | None = None  # contracted at every step along the reduced one; always whole in one block

    @property
    def dims(self) -> tuple[Dim, ...]:
        return (*self.parallel, *(d for d in (self.sequential, self.reduced, self.inner) if d is not None))

    @property
    def programs(self) -> Index:
        return product(tuple(d.steps for d in self.parallel))


def layout(kernel: KernelOp, schedule: Schedule) -> Layout:
    """The dims of a kernel under a schedule; refuses blocks that do not fit the kernel."""
    sizes = {a.axis.data: a.size.expr for a in kernel.axes}
    axis = reduced_axis(kernel)
    blocks = {tuple(key.split()): n for key, n in schedule.blocks}
    for key, n in blocks.items():
        _check(kernel, key, n)
    groups: list[tuple[tuple[str, ...], int]] = []
    sequential = kernel.sequential_axis
    names = [a for a in kernel.axis_names(PARALLEL) if a != sequential]
    while names:
        key = next((k for k in blocks if k[0] == names[0]), (names[0],))
        if tuple(names[: len(key)]) != key:
            raise OptionError(f"expected a block over neighbouring parallel axes of {kernel.axis_names()}, got {key}")
        block = blocks.get(key, 1)
        if block == 1 and groups and groups[-1][1] == 1:
            groups[-1] = (groups[-1][0] + key, 1)
        else:
            groups.append((key, block))
        del names[: len(key)]
    parallel = tuple(Dim(key, tuple(sizes[a] for a in key), block) for key, block in groups)
    if axis is None:
        return Layout(parallel, None)
    reduced = Dim((axis,), (sizes[axis],), max(_reduce_block(blocks, axis, sizes, schedule), 2), True)
    step = None if sequential is None else Dim((sequential,), (sizes[sequential],), blocks.get((sequential,), 1))
    return Layout(parallel, reduced, step, _inner(kernel, sizes))


def _inner(kernel: KernelOp, sizes: Mapping[str, Index]) -> Dim | None:
    axis = inner_axis(kernel)
    if axis is None:
        return None
    size = sizes[axis].constant
    if size is None:
        raise NotImplementedError(f"{axis!r} is summed over at every step of a loop: its size has to be known")
    return Dim((axis,), (sizes[axis],), max(power_of_two(size), 16), True)


def _reduce_block(blocks: Mapping, axis: str, sizes: Mapping[str, Index], schedule: Schedule) -> int:
    size = sizes[axis].constant
    if (block := blocks.get((axis,))) is None:
        if schedule.loop or size is None:
            raise OptionError(f"expected a block for the reduced axis {axis!r}, got {schedule.blocks}")
        return power_of_two(size)
    if size is not None and not schedule.loop and size > block:
        raise OptionError(f"one block of {block} cannot hold the {size} elements of {axis!r}; try loop=True")
    return block


def _check(kernel: KernelOp, key: tuple[str, ...], block: int) -> None:
    unknown = set(key) - set(kernel.axis_names())
    if unknown or block < 1 or block & (block - 1):
        raise OptionError(
            f"{kernel.sym_name.data}: expected blocks that are powers of two over {kernel.axis_names()}, "
            f"got {' '.join(key)}={block}"
        )


def bound(expr: Index, values: Mapping[str, int]) -> int:
    """An upper bound of `expr` where every axis is at its largest; gathered indices are not counted."""
    total = 0
    for factors, c in expr.terms:
        if c > 0:
            total += c * math.prod(_atom_bound(a, values) for a in factors)
    return total


def _atom_bound(atom, values: Mapping[str, int]) -> int:
    if isinstance(atom, Quotient):
        left, right = bound(atom.left, values), max(bound(atom.right, values), 1)
        if atom.kind == "//":
            return left // right if atom.right.constant else left
        return min(left, right - 1)
    return values.get(atom.name, 1)


def needs_wide(kernel: KernelOp, values: Mapping[str, int]) -> bool:
    """Whether an offset or a position can leave 32 bits at these sizes; a symbol not given counts as 1."""
    values = {s.data: values.get(s.data, 1) for s in kernel.symbol_names}
    limits = dict(values)
    total = 1
    for a in kernel.axes:
        size = a.size.expr.evaluate(values.__getitem__, int)
        limits[a.axis.data] = max(size - 1, 0)
        total *= max(size, 1) if a.kind.data == PARALLEL else 1
    exprs = [op.at.expr for op in kernel.block.ops if isinstance(op, (LoadOp, StoreOp, IotaOp))]
    return max([total, *(bound(e, limits) for e in exprs)]) >= LARGEST
