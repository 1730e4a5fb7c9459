"""Index expressions: integer polynomials over axes, symbols and gathered indices, with floor division and modulo.

An `Index` is kept in normal form, a sum of integer multiples of products of atoms, so that equal expressions are
equal objects and the stride along an axis can be read off. Its text is Python (`i * m + r // 4`) and parses back.
Atoms are names, `$0`-like gathered indices (written `_0`), and floor divisions and modulos of expressions.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Name:
    """An axis, a symbol, or a gathered index `_k`."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Quotient:
    """left // right or left % right; both sides are never negative."""

    kind: str  # "//" or "%"
    left: Index
    right: Index

    def mentions(self, axis: str) -> bool:
        return axis in self.left.names() | self.right.names()

    def __str__(self) -> str:
        return f"{_group(self.left)} {self.kind} {_group(self.right)}"


Atom = Name | Quotient
Product = tuple[Atom, ...]


def _key(product: Product) -> tuple:
    return (len(product), tuple(map(str, product)))


@dataclass(frozen=True)
class Index:
    terms: tuple[tuple[Product, int], ...]  # sorted by product, no zero factors; () is the constant's product

    # --- making ---

    @staticmethod
    def of(x: Index | int | str) -> Index:
        if isinstance(x, Index):
            return x
        return parse(x) if isinstance(x, str) else Index((((), x),) if x else ())

    @staticmethod
    def _from(terms: Mapping[Product, int]) -> Index:
        kept = [(p, c) for p, c in terms.items() if c]
        return Index(tuple(sorted(kept, key=lambda t: _key(t[0])) if len(kept) > 1 else kept))

    def __add__(self, other: Index | int) -> Index:
        other = Index.of(other)
        if not self.terms or not other.terms:
            return self if self.terms else other
        terms = dict(self.terms)
        for product, factor in other.terms:
            terms[product] = terms.get(product, 0) + factor
        return Index._from(terms)

    def times(self, factor: int) -> Index:
        """Multiples of the same products, in the same order."""
        return self if factor == 1 else Index(tuple((p, c * factor) for p, c in self.terms) if factor else ())

    def __mul__(self, other: Index | int) -> Index:
        other = Index.of(other)
        if (factor := other.constant) is not None:
            return self.times(factor)
        if (factor := self.constant) is not None:
            return other.times(factor)
        terms: dict[Product, int] = {}
        for p, a in self.terms:
            for q, b in other.terms:
                product = tuple(sorted(p + q, key=str))
                terms[product] = terms.get(product, 0) + a * b
        return Index._from(terms)

    def __sub__(self, other: Index | int) -> Index:
        return self + Index.of(other) * -1

    def __neg__(self) -> Index:
        return self * -1

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: Index | int) -> Index:
        return Index.of(other) - self

    def __floordiv__(self, other: Index | int) -> Index:
        right = Index.of(other)
        if right.constant == 1:
            return self
        whole, rest = self._apart(right)
        if rest.constant == 0:
            return whole
        if rest.constant is not None and right.constant is not None:
            return whole + rest.constant // right.constant
        return whole + Index((((Quotient("//", rest, right),), 1),))

    def __mod__(self, other: Index | int) -> Index:
        right = Index.of(other)
        if right.constant == 1:
            return Index(())
        _, rest = self._apart(right)
        if rest.constant == 0:
            return rest
        if rest.constant is not None and right.constant is not None:
            return Index.of(rest.constant % right.constant)
        return Index((((Quotient("%", rest, right),), 1),))

    def _apart(self, right: Index) -> tuple[Index, Index]:
        """As `_split`, where the others alone cannot be negative: what a quotient divides never is."""
        whole, rest = self._split(right)
        numbers = rest.constant is not None and right.constant is not None
        return (whole, rest) if numbers or not rest.subtracts() else (Index(()), self)

    def _split(self, right: Index) -> tuple[Index, Index]:
        """Terms that are multiples of `right`, divided by it, and the others."""
        if len(right.terms) != 1:
            return Index(()), self
        (product, factor) = right.terms[0]
        whole: dict[Product, int] = {}
        rest: dict[Product, int] = {}
        for p, c in self.terms:
            left = list(p)
            divides = c % factor == 0
            for atom in product:
                if atom in left:
                    left.remove(atom)
                else:
                    divides = False
            (whole if divides else rest)[tuple(left) if divides else p] = c // factor if divides else c
        return Index._from(whole), Index._from(rest)

    # --- asking ---

    @property
    def constant(self) -> int | None:
        """The number this is, if it is one."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and self.terms[0][0] == () else None

    def subtracts(self) -> bool:
        """Whether a term is negative, so that the whole may be."""
        return any(c < 0 for _, c in self.terms)

    def names(self) -> frozenset[str]:
        names: set[str] = set()
        for product, _ in self.terms:
            for atom in product:
                if isinstance(atom, Name):
                    names.add(atom.name)
                else:
                    names |= atom.left.names() | atom.right.names()
        return frozenset(names)

    def stride(self, axis: str) -> Index | None:
        """What one step along `axis` adds, or None where that is not the same everywhere."""
        factor: dict[Product, int] = {}
        for product, c in self.terms:
            count = sum(isinstance(a, Name) and a.name == axis for a in product)
            if _inside(product, axis) or count > 1:
                return None
            if count:
                rest = tuple(a for a in product if not (isinstance(a, Name) and a.name == axis))
                factor[rest] = factor.get(rest, 0) + c
        return Index._from(factor)

    def run(self, axis: str, size: int) -> int:
        """Positions along `axis`, of `size`, that lie side by side in memory: all of them, or those until a flattened
        axis comes to its inner axis' end; 1 where none do."""
        inner = [(product, c) for product, c in self.terms if _inside(product, axis)]
        plain = Index._from({p: c for p, c in self.terms if (p, c) not in inner}).stride(axis)
        if plain is None or plain.constant is None:
            return 1
        step, run = plain.constant, size
        for product, c in inner:
            atom = product[0]
            if len(product) > 1 or not isinstance(atom, Quotient) or (right := atom.right.constant) is None:
                return 1
            along = atom.left.stride(axis)
            if along is None or along.constant != 1:
                return 1
            run = math.gcd(run, right) if run < size else right
            step += c if atom.kind == "%" else 0
        return min(run, size) if step == 1 else 1

    def substitute(self, values: Mapping[str, Index | int]) -> Index:
        """The same expression with names replaced."""
        total = Index(())
        for product, c in self.terms:
            part = Index.of(c)
            for atom in product:
                if isinstance(atom, Name):
                    part = part * Index.of(values[atom.name] if atom.name in values else Index((((atom,), 1),)))
                else:
                    left, right = atom.left.substitute(values), atom.right.substitute(values)
                    part = part * (left // right if atom.kind == "//" else left % right)
            total = total + part
        return total

    def evaluate(self, look: Callable[[str], T], number: Callable[[int], T]) -> T:
        """Fold with the operators of any type that has + * // % (ints, arrays, an emitter's values)."""
        total: T | None = None
        for product, c in self.terms:
            part: T | None = number(c) if c != 1 or not product else None
            for atom in product:
                if isinstance(atom, Name):
                    x = look(atom.name)
                else:
                    left, right = atom.left.evaluate(look, number), atom.right.evaluate(look, number)
                    x = left // right if atom.kind == "//" else left % right  # type: ignore[operator]
                part = x if part is None else part * x  # type: ignore[operator]
            assert part is not None
            total = part if total is None else total + part  # type: ignore[operator]
        return number(0) if total is None else total

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        parts = []
        for product, c in self.terms:
            factors = [_group_atom(a) for a in product]
            if c != 1 or not factors:
                factors.append(str(c) if c >= 0 else f"({c})")
            parts.append(" * ".join(factors))
        return " + ".join(parts)


def _inside(product: Product, axis: str) -> bool:
    """Whether an axis stands under a division."""
    return any(isinstance(a, Quotient) and a.mentions(axis) for a in product)


def name(text: str) -> Index:
    return Index((((Name(text),), 1),))


def gathered(position: int) -> Index:
    """The position-th integer value handed to a load, store or iota."""
    return name(f"_{position}")


def _group(e: Index) -> str:
    single = len(e.terms) == 1 and (e.constant is not None or (len(e.terms[0][0]) == 1 and e.terms[0][1] == 1))
    return str(e) if single and not (e.terms[0][0] and isinstance(e.terms[0][0][0], Quotient)) else f"({e})"


def _group_atom(a: Atom) -> str:
    return str(a) if isinstance(a, Name) else f"({a})"


@functools.cache
def parse(text: str) -> Index:
    """The expression that `str` printed."""
    try:
        return _convert(ast.parse(text, mode="eval").body)
    except SyntaxError:
        raise ValueError(f"expected an index expression of names, numbers, + - * // and %, got {text!r}") from None


def _convert(node: ast.expr) -> Index:
    match node:
        case ast.Constant(value=int(value)):
            return Index.of(value)
        case ast.Name(id=text):
            return name(text)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_convert(operand)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _convert(left), _convert(right)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.FloorDiv():
                    return a // b
                case ast.Mod():
                    return a % b
    raise ValueError(f"expected an index expression of names, numbers, + - * // and %, got {ast.unparse(node)!r}")
