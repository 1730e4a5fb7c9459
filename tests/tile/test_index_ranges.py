"""Index arithmetic over ranges: whatever is rewritten has the value Python's // and % give, at every point.

Targets divide without a sign, so beside the value one more thing holds: what is divided is never negative, also at
points where a condition hides the result, and where only part of an expression was left to divide.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from programs import trace_of

import tessera
from tessera.ir.interp import run
from tessera.tile.dialect import interp
from tessera.tile.dialect.index import Index, Quotient, name
from tessera.tile.from_trace.index import Ranges, Unlowerable
from tessera.tile.from_trace.launch import launcher
from tessera.tile.from_trace.region import lower

Point = dict[str, int]


@dataclass(frozen=True)
class Both:
    """An expression as Tessera writes it, beside the value that Python gives it at a point."""

    index: Index
    value: Callable[[Point], int]


def points(sizes: dict[str, int], extra: Point) -> Iterator[Point]:
    for at in itertools.product(*map(range, sizes.values())):
        yield dict(zip(sizes, at, strict=True)) | extra


def divided(e: Index) -> Iterator[Index]:
    for atoms, _ in e.terms:
        for atom in atoms:
            if isinstance(atom, Quotient):
                yield atom.left
                yield from divided(atom.left)
                yield from divided(atom.right)


def at_point(e: Index, point: Point) -> int:
    return e.evaluate(point.__getitem__, int)


def grow(made: list[Both], rng: random.Random, ranges: Ranges, by: list[Both]) -> Both:
    """One more expression: a sum of made ones, or one of them divided, which may be negative."""
    x = rng.choice(made)
    if rng.random() < 0.4:
        y, a, b, c = rng.choice(made), rng.choice([-2, -1, 1, 2, 3]), rng.choice([-1, 1, 2, 4]), rng.randint(-9, 9)
        return Both(ranges.join(x.index * a + y.index * b + c), lambda p, x=x, y=y: x.value(p) * a + y.value(p) * b + c)
    d = rng.choice(by)
    if rng.random() < 0.3:  # both halves at once, as a reshape there and back has them
        whole = ranges.div(x.index, d.index) * d.index + ranges.mod(x.index, d.index)
        return Both(ranges.join(whole), x.value)
    if rng.random() < 0.5:
        return Both(ranges.div(x.index, d.index), lambda p: x.value(p) // d.value(p))
    return Both(ranges.mod(x.index, d.index), lambda p: x.value(p) % d.value(p))


@pytest.mark.parametrize("symbolic", [False, True], ids=["numbers", "symbols"])
def test_divisions_have_their_value_at_every_point(symbolic: bool) -> None:
    for seed in range(400):
        rng = random.Random(seed)
        sizes = {n: rng.randint(1, 5) for n in "ijk"}
        n = name("s0")
        written = {axis: Index.of(size) for axis, size in sizes.items()} | ({"j": n} if symbolic else {})
        ranges = Ranges(written)
        extra = {"s0": sizes["j"]} if symbolic else {}
        made = [Both(name(a), lambda p, a=a: p[a]) for a in sizes]
        by = [Both(Index.of(d), lambda p, d=d: d) for d in (2, 3, 4, 6)]
        by += [Both(n, lambda p: p["s0"]), Both(n * 2, lambda p: p["s0"] * 2)] if symbolic else []
        for _ in range(7):
            made.append(grow(made, rng, ranges, by))
        for point in points(sizes, extra):
            for e in made:
                assert at_point(e.index, point) == e.value(point), f"seed {seed}: {e.index} at {point}"
                for left in divided(e.index):
                    assert at_point(left, point) >= 0, f"seed {seed}: {left} is divided in {e.index} at {point}"
        for e in made:
            assert Index.of(str(e.index)) == e.index
            for size in (1, 2, 5, 9):
                if ranges.within(e.index, Index.of(size)):
                    assert all(0 <= e.value(p) < size for p in points(sizes, extra))


def test_what_stands_before_the_first_row_is_not_divided_below_zero() -> None:
    ranges = Ranges({"i": Index.of(2), "j": Index.of(4)})
    place = name("j") * 2 + name("i") - 1
    assert ranges.div(place, Index.of(2)) == name("j") - 1 + (name("i") + 1) // 2
    assert ranges.mod(place, Index.of(2)) == (name("i") + 1) % 2


def weave(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    return torch.stack([even, odd], 1).flatten(0, 1)


def scan(x: torch.Tensor) -> torch.Tensor:
    """A running sum by halves: pairs are summed, scanned, and woven back with what lies between them."""
    if x.shape[0] == 1:
        return x
    pairs = scan(x[:-1:2] + x[1::2])
    even = torch.cat([x[:1], x[2::2] + pairs[:-1]]) if x.shape[0] > 2 else x[:1]
    return weave(even, pairs)


def check_agrees(fn: Callable, *args: torch.Tensor) -> None:
    trace = trace_of(fn, *args)
    lowered = lower(trace)
    launch = launcher(trace, lowered, lambda tensors, symbols: interp.run(lowered.kernel, tensors, symbols))
    torch.testing.assert_close(launch(*args), tuple(run(trace, *args)))


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_a_scan_by_halves(rows: int) -> None:
    x = torch.arange(rows * 6, dtype=torch.float64).reshape(6, rows).T
    check_agrees(scan, x)


def test_a_scan_that_reads_at_too_many_places_is_several_kernels() -> None:
    """Each half reads the halves before it, four times as many with each."""
    x = torch.arange(16 * 6, dtype=torch.float64).reshape(6, 16).T
    with pytest.raises(Unlowerable, match="at more and more places"):
        check_agrees(scan, x)
    torch.testing.assert_close(tessera.jit(scan)(x), scan(x))


def test_a_mirror_of_an_odd_number_of_copies() -> None:
    x = torch.arange(5.0)
    check_agrees(lambda x: torch.repeat_interleave(x, 2)[:9].flip(0) + 1, x)
    check_agrees(lambda x: x[:, None].expand(5, 2).reshape(10)[:9].flip(0).exp(), x)
