"""Index arithmetic that knows how far every axis runs, so that views undo each other.

`(i * 64 + c) // 64` is `i` where `c` stays below 64, and `(m // 64) * 64 + m % 64` is `m`. Sizes may be symbolic:
an upper bound is then a polynomial of the sizes, and "never negative" is proved coefficient by coefficient for
sizes of one and more. What cannot be proved is left as a floor division or a modulo, which is always right; what it
divides is never negative, neither where a condition hides the element nor where a part of an expression is left over.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tessera.ir.formula import Formula
from tessera.ir.types import Size, known
from tessera.tile.dialect.index import Index, Name, Product, Quotient, name
from tessera.torch_internals import shapes

if TYPE_CHECKING:
    import sympy

ZERO, ONE = Index.of(0), Index.of(1)
Indices = tuple[Index, ...]


class Unlowerable(Exception):
    """A region that has no kernel; the message says why."""


# --- sizes --------------------------------------------------------------------------------------------


def size_index(size: Size) -> Index:
    """A size of a trace, an int or a symbolic expression, as an index expression over its symbols."""
    size = size if isinstance(size, Formula) else known(size)
    return Index.of(size) if isinstance(size, int) else _converted(size)


def sizes_of(sizes: Sequence[Size]) -> Indices:
    return tuple(map(size_index, sizes))


def strides_of(strides: Sequence[Size]) -> Indices:
    """Strides as index expressions. PyTorch steps over `max(1, n)` elements, lest n be 0: but then nothing is read."""
    return tuple(size_index(s) if isinstance(s, int) else _converted(s, stride=True) for s in strides)


def _converted(size: torch.SymInt | Formula, stride: bool = False) -> Index:
    if isinstance(size, Formula):
        return _of_formula(size.tree, stride)
    return _convert(size.node.expr, stride)


@functools.lru_cache(maxsize=1 << 14)  # a symbolic size is asked for at each of its uses
def _convert(e: sympy.Expr, stride: bool = False) -> Index:
    if e.is_Integer:
        return Index.of(int(e))
    if e.is_Symbol:
        return name(str(e))
    parts = [_convert(a, stride) for a in e.args]  # type: ignore[arg-type]
    if stride and isinstance(e, _maxima()) and len(parts) == 2 and ONE in parts:
        return parts[1 - parts.index(ONE)]
    if e.is_Add:
        return sum(parts, ZERO)
    if e.is_Mul:
        return product(parts)
    if e.is_Pow and e.args[1].is_Integer and int(e.args[1]) > 0:  # type: ignore[attr-defined,arg-type]
        return product([parts[0]] * int(e.args[1]))  # type: ignore[arg-type]
    if isinstance(e, (shapes.size_functions.FloorDiv, shapes.size_functions.CleanDiv)):
        return _divided(parts[0]) // parts[1]
    if isinstance(e, (shapes.size_functions.Mod, shapes.size_functions.PythonMod)):
        return _divided(parts[0]) % parts[1]
    raise Unlowerable(f"the size {e} is no expression a kernel can compute")


@functools.cache
def _maxima() -> tuple[type, ...]:
    import sympy

    return sympy.Max, shapes.size_functions.Max


def _of_formula(tree: object, stride: bool) -> Index:
    """As `_convert`, of a size that comes from a file."""
    if isinstance(tree, int):
        return Index.of(tree)
    if isinstance(tree, str):
        return name(tree)
    if isinstance(tree, float):
        raise Unlowerable(f"{tree} is no number of elements")
    kind, *trees = tree  # type: ignore[misc]
    parts = [_of_formula(t, stride) for t in trees]
    match kind:
        case "Max" if stride and len(parts) == 2 and ONE in parts:
            return parts[1 - parts.index(ONE)]
        case "Add":
            return sum(parts, ZERO)
        case "Mul":
            return product(parts)
        case "Pow":
            return product([parts[0]] * trees[1])
        case "FloorDiv" | "CleanDiv":
            return _divided(parts[0]) // parts[1]
        case "Mod" | "PythonMod":
            return _divided(parts[0]) % parts[1]
    raise Unlowerable(f"the size {tree} is no expression a kernel can compute")


def _divided(x: Index) -> Index:
    """What a kernel divides, which is never negative: `(n - 3) // 2` is a size, so that n is large enough, but `-3 % n`
    and `(a - b) // 2` may be of a negative number."""
    names = [factor for product, factor in x.terms if product]
    if x.constant is not None and x.constant >= 0 or names and min(names) > 0:
        return x
    raise Unlowerable(f"what a size divides, {x}, may be negative, and kernels divide no such numbers")


def product(parts: Sequence[Index]) -> Index:
    return math.prod(parts, start=ONE)


def is_symbolic(size: object) -> bool:
    return isinstance(size, torch.SymInt)


# --- what is never negative -----------------------------------------------------------------------------


class Ranges:
    """The axes and their sizes; other names are sizes themselves, at least one, or gathered, which know no bound."""

    def __init__(self, sizes: dict[str, Index]) -> None:
        self.sizes = sizes
        self._within: dict[tuple[Index, Index], bool] = {}

    def high(self, e: Index) -> Index | None:
        """An upper bound over all points, as an expression of the sizes."""
        return self._bound(e, positive=True)

    def low(self, e: Index) -> Index | None:
        return self._bound(e, positive=False)

    def _bound(self, e: Index, positive: bool) -> Index | None:
        total = ZERO
        for atoms, factor in e.terms:
            if atoms and (factor > 0) != positive:
                if any(isinstance(a, Name) and a.name.startswith("_") for a in atoms):
                    return None
                if all(isinstance(a, Name) and a.name not in self.sizes for a in atoms):
                    total = total + Index(((atoms, factor),))  # of sizes alone: known exactly
                continue  # axes start at zero
            tops = [self._top(a) for a in atoms]
            if None in tops:
                return None
            total = total + product([t for t in tops if t is not None]) * factor
        return total

    def _top(self, atom: Name | Quotient) -> Index | None:
        if isinstance(atom, Name):
            if atom.name.startswith("_"):
                return None
            return self.sizes[atom.name] - 1 if atom.name in self.sizes else name(atom.name)
        if atom.kind == "%":
            return atom.right - 1
        left = self.high(atom.left)
        if left is None:
            return None
        whole, rest = left._split(atom.right)  # (a * d + b) // d is at most a where b < d, at most a + b otherwise
        return whole if never_negative(atom.right - rest - 1) else left

    def within(self, e: Index, size: Index) -> bool:
        """0 <= e < size everywhere."""
        key = (e, size)
        if key not in self._within:
            low, high = self.low(e), self.high(e)
            self._within[key] = (
                low is not None and high is not None and never_negative(low) and never_negative(size - 1 - high)
            )
        return self._within[key]

    # --- division that uses it ---

    def div(self, e: Index, by: Index) -> Index:
        whole, rest = self._divide(e, by)
        if by == ONE or self.within(rest, by):
            return whole
        if (inner := _lone(rest)) is not None:
            if inner.kind == "//":  # (x // a) // b
                return whole + self.div(inner.left, inner.right * by)
            if self.mod(inner.right, by) == ZERO:  # (x % (a * b)) // b
                return whole + self.mod(self.div(inner.left, by), inner.right // by)
        if (parts := self._common(rest, by)) is not None:
            big, _, g = parts
            return whole + self.div(big, Index.of(_number(by) // g))
        return whole + rest // by

    def mod(self, e: Index, by: Index) -> Index:
        _, rest = self._divide(e, by)
        if by == ONE:
            return ZERO
        if self.within(rest, by):
            return rest
        inner = _lone(rest)
        if inner is not None and inner.kind == "%" and (inner.right._split(by))[1] == ZERO:  # (x % (a * b)) % b
            return self.mod(inner.left, by)
        if (parts := self._common(rest, by)) is not None:
            big, small, g = parts
            return self.mod(big, Index.of(_number(by) // g)) * g + small
        return rest % by

    def _divide(self, e: Index, by: Index) -> tuple[Index, Index]:
        """e = whole * by + rest, with a rest that is never negative: of `2 * j + i - 1` by 2 that is `i + 1`."""
        whole, rest = e._split(by)
        if self._never_negative(rest):
            return whole, rest
        if self._never_negative(e):
            return ZERO, e
        for term, factor in rest.terms:
            if factor < 0:
                taken = Index(((term, factor if by.constant is None else factor // by.constant),))
                whole, rest = whole + taken, rest - taken * by
        return whole, rest

    def _never_negative(self, e: Index) -> bool:
        return not e.subtracts() or ((low := self.low(e)) is not None and never_negative(low))

    def _common(self, e: Index, by: Index) -> tuple[Index, Index, int] | None:
        """e = big * g + small with 0 <= small < g, where g divides `by`."""
        number = by.constant
        if number is None:
            return None
        for g in sorted({math.gcd(c, number) for _, c in e.terms}, reverse=True):
            if g < 2 or g == number:
                continue
            big = Index(tuple((p, c // g) for p, c in e.terms if c % g == 0))
            small = Index(tuple((p, c) for p, c in e.terms if c % g))
            if big.terms and self.within(small, Index.of(g)):
                return big, small, g
        return None

    def join(self, e: Index) -> Index:
        """(x // d) * d + x % d is x, and ((x // d) % a) * d + x % d is x % (a * d), wherever the terms stand."""
        while (joined := self._join_once(e)) is not None:
            e = joined
        return e

    def _join_once(self, e: Index) -> Index | None:
        terms = dict(e.terms)
        for atoms, factor in e.terms:
            for place, atom in enumerate(atoms):
                if not isinstance(atom, Quotient) or atom.kind != "%":
                    continue
                others: Product = atoms[:place] + atoms[place + 1 :]
                rest = Index(((others, factor),))
                for upper, joined in self._partners(atom, terms):
                    term = rest * atom.right * Index((((upper,), 1),))
                    if len(term.terms) == 1 and terms.get(term.terms[0][0]) == term.terms[0][1]:
                        return e - Index(((atoms, factor),)) - term + rest * joined
        return None

    def _partners(self, low: Quotient, terms: dict[Product, int]) -> list[tuple[Quotient, Index]]:
        """Atoms that hold the upper part of what `low` is the lower part of, with what both make together."""
        quotient = self.div(low.left, low.right)
        partners: list[tuple[Quotient, Index]] = []
        for atoms in terms:
            for atom in atoms:
                if not isinstance(atom, Quotient):
                    continue
                if Index((((atom,), 1),)) == quotient:
                    partners.append((atom, low.left))
                elif atom.kind == "%" and atom.left == quotient:
                    partners.append((atom, self.mod(low.left, low.right * atom.right)))
        return partners

    # --- positions ---

    def flatten(self, at: Sequence[Index], shape: Sequence[Index]) -> Index:
        """The place of an element when its dimensions are written out row by row."""
        total = ZERO
        for i, size in zip(at, shape, strict=True):
            total = total * size + i
        return self.join(total)

    def unflatten(self, place: Index, shape: Sequence[Index]) -> Indices:
        at: list[Index] = []
        for k, size in enumerate(shape):
            if size == ONE:
                at.append(ZERO)
                continue
            inner = product(list(shape[k + 1 :]))
            first = all(s == ONE for s in shape[:k])
            step = self.div(place, inner)
            at.append(step if first else self.mod(step, size))
        return tuple(at)

    def reshape(self, at: Sequence[Index], shape: Sequence[Index], into: Sequence[Index]) -> Indices:
        """Positions in another shape of as many elements; dimensions that both shapes have keep their index."""
        indices: list[Index] = []
        for left, right in groups(shape, into):
            here = [shape[d] for d in left]
            place = self.flatten([at[d] for d in left], here)
            indices += self.unflatten(place, [into[d] for d in right])
        return tuple(indices)


def never_negative(e: Index) -> bool:
    """For all sizes of one and more: every coefficient is at least zero when sizes count from one."""
    if (number := e.constant) is not None:
        return number >= 0
    names = {a.name for atoms, _ in e.terms for a in atoms if isinstance(a, Name)}
    return all(c >= 0 for _, c in e.substitute({n: name(n) + 1 for n in names}).terms)


def groups(shape: Sequence[Index], into: Sequence[Index]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of two shapes that hold the same number of elements, as short as they come."""
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(into):
        left, right = list(range(i, min(i + 1, len(shape)))), list(range(j, min(j + 1, len(into))))
        i, j = i + len(left), j + len(right)
        while (a := product([shape[d] for d in left])) != (b := product([into[d] for d in right])):
            more_left = _smaller(a, b) if i < len(shape) and j < len(into) else i < len(shape)
            if more_left:
                left.append(i)
                i += 1
            elif j < len(into):
                right.append(j)
                j += 1
            else:
                raise Unlowerable(f"sizes {list(map(str, shape))} and {list(map(str, into))} cannot be matched")
        runs.append((left, right))
    return runs


def _smaller(a: Index, b: Index) -> bool:
    if a.constant is not None and b.constant is not None:
        return a.constant < b.constant
    return never_negative(b - a)


def _lone(e: Index) -> Quotient | None:
    if len(e.terms) == 1 and e.terms[0][1] == 1 and len(e.terms[0][0]) == 1:
        atom = e.terms[0][0][0]
        return atom if isinstance(atom, Quotient) else None
    return None


def _number(e: Index) -> int:
    assert e.constant is not None
    return e.constant
