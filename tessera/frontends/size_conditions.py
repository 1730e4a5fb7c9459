"""From which size on a condition on one size holds, decided by arithmetic and not by trying sizes.

In: a condition as text over `n`, a whole number. Out: the least number from which on it always holds.

Take P, the product of all numbers that the condition divides by, and write n = P·m + r. For a fixed r every part of the
condition is then a polynomial in m with whole coefficients: a division by d meets coefficients that d divides, and
moves into the constant one. A polynomial that is not zero has the sign of its first coefficient once m is past the
bound of its roots. So, beyond some n, the answer depends on r alone, and below it there are few sizes to look at.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from functools import reduce

_PERIOD = 2**10  # the largest P
_LOOKED_AT = 2**16  # sizes below the one from which on the answer depends on r alone
_POWER = 4
_DEPTH = 32

Polynomial = tuple[int, ...]  # coefficients, the constant one first; the last is not 0, and zero is ()


class _UnknownError(Exception):
    """The condition says something else than arithmetic over `n`."""


def holds_from(condition: str, low: int, high: int | None = None) -> int | None:
    """The size from which on a condition holds, up to `high`; None where it says something else, or holds for no large
    size."""
    try:
        tree = ast.parse(condition.strip(), mode="eval").body
        _check_depth(tree)
        tree = _WholeNumbers().visit(tree)
        period = _period(tree)
        tails = [_Tail(tree, (residue, period)) for residue in range(period)]
        settled = max([low, *(period * (tail.bound + 1) + r for r, tail in enumerate(tails))])
        last = settled if high is None else min(high, settled)
        if last - low > _LOOKED_AT:
            return None
        failing = [n for n in range(low, last + 1) if not _Tail(tree, (n,)).holds]
    except (_UnknownError, SyntaxError, RecursionError, ValueError):
        return None
    if last == settled and not all(tail.holds for tail in tails):
        return None
    first = failing[-1] + 1 if failing else low
    return first if high is None or first <= high else None


class _Tail:
    """What a condition says where n is a polynomial in m, for every m above `bound`. A number is one of degree 0."""

    def __init__(self, condition: ast.expr, size: Polynomial) -> None:
        self.bound = 0
        self.size = _trimmed(size)
        self.holds = self.truth(condition)

    def truth(self, node: ast.expr) -> bool:
        match node:
            case ast.BoolOp(op=ast.And()):
                return all([self.truth(x) for x in node.values])  # each of them, for its bound
            case ast.BoolOp(op=ast.Or()):
                return any([self.truth(x) for x in node.values])
            case ast.UnaryOp(op=ast.Not()):
                return not self.truth(node.operand)
            case ast.Constant(value=bool(value)):
                return value
            case ast.Compare(
                left=ast.Name(id="n"), ops=[ast.LtE()], comparators=[ast.Call(func=ast.Name(id="IntInfinity"))]
            ):
                return True
            case ast.Compare():
                terms = [self.value(x) for x in (node.left, *node.comparators)]
                pairs = zip(node.ops, terms[:-1], terms[1:], strict=True)
                return all([_compared(op, self.sign(_minus(a, b))) for op, a, b in pairs])
        raise _UnknownError

    def value(self, node: ast.expr) -> Polynomial:
        match node:
            case ast.Name(id="n"):
                return self.size
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                return _trimmed((value,))
            case ast.UnaryOp(op=ast.USub()):
                return _minus((), self.value(node.operand))
            case ast.BinOp():
                return self.combined(node.op, self.value(node.left), self.value(node.right))
            case ast.Call(func=ast.Name(id="Max" | "max"), keywords=[]) if node.args:
                return reduce(lambda a, b: a if self.sign(_minus(a, b)) > 0 else b, map(self.value, node.args))
            case ast.Call(func=ast.Name(id="Min" | "min"), keywords=[]) if node.args:
                return reduce(lambda a, b: a if self.sign(_minus(a, b)) < 0 else b, map(self.value, node.args))
            case ast.Call(func=ast.Name(id="Mod"), args=[left, right], keywords=[]):
                return self.combined(ast.Mod(), self.value(left), self.value(right))
        raise _UnknownError

    def combined(self, op: ast.operator, a: Polynomial, b: Polynomial) -> Polynomial:
        match op:
            case ast.Add():
                return _minus(a, _minus((), b))
            case ast.Sub():
                return _minus(a, b)
            case ast.Mult():
                return _times(a, b)
            case ast.Pow() if len(b) <= 1 and 0 <= sum(b) <= _POWER:
                return reduce(_times, [a] * sum(b), (1,))
            case ast.FloorDiv() | ast.Mod() if len(b) == 1 and all(x % b[0] == 0 for x in a[1:]):
                constant, rest = divmod(a[0] if a else 0, b[0])
                return (
                    _trimmed((constant, *(x // b[0] for x in a[1:])))
                    if isinstance(op, ast.FloorDiv)
                    else _trimmed((rest,))
                )
            case ast.FloorDiv() | ast.Mod() if len(b) > len(a) and self.sign(a) >= 0 and self.sign(_minus(b, a)) > 0:
                return () if isinstance(op, ast.FloorDiv) else a  # what grows divides less than itself
        raise _UnknownError

    def sign(self, a: Polynomial) -> int:
        """-1, 0 or 1, beyond Cauchy's bound of the roots."""
        if not a:
            return 0
        self.bound = max(self.bound, 1 + math.ceil(max(map(abs, a[:-1]), default=0) / abs(a[-1])))
        return 1 if a[-1] > 0 else -1


_COMPARISONS: dict[type[ast.cmpop], Callable[[int], bool]] = {
    ast.Eq: lambda sign: sign == 0,
    ast.NotEq: lambda sign: sign != 0,
    ast.Lt: lambda sign: sign < 0,
    ast.LtE: lambda sign: sign <= 0,
    ast.Gt: lambda sign: sign > 0,
    ast.GtE: lambda sign: sign >= 0,
}


def _compared(op: ast.cmpop, sign: int) -> bool:
    if type(op) not in _COMPARISONS:
        raise _UnknownError
    return _COMPARISONS[type(op)](sign)


def _period(tree: ast.expr) -> int:
    """The product of all that is divided by."""
    period = 1
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(op=ast.FloorDiv() | ast.Mod(), right=ast.Constant(value=int(divisor))):
                period *= divisor
            case ast.Call(func=ast.Name(id="Mod"), args=[_, ast.Constant(value=int(divisor))]):
                period *= divisor
        if not 1 <= period <= _PERIOD:
            raise _UnknownError
    return period


class _WholeNumbers(ast.NodeTransformer):
    """Sizes that were multiplied by a float, or divided, and rounded: `trunc(1.5*float(n))`, as resizing images has it,
    is `3*n//2`, and `ceil(n/2)` is `-(-n//2)`.

    A float that is a whole number of halves, quarters and so on is exact in such a product."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(attr="sym_float"), args=[size], keywords=[]):
                return size
            case ast.Call(func=ast.Attribute(attr="trunc" | "floor"), args=[ast.BinOp() as ratio], keywords=[]):
                return _cut_off(ratio)
            case ast.Call(func=ast.Attribute(attr="ceil"), args=[ast.BinOp() as ratio], keywords=[]):
                if isinstance(ratio.left, ast.Constant):
                    negated = ast.BinOp(ratio.left, ratio.op, ast.UnaryOp(ast.USub(), ratio.right))
                else:
                    negated = ast.BinOp(ast.UnaryOp(ast.USub(), ratio.left), ratio.op, ratio.right)
                return ast.UnaryOp(ast.USub(), _cut_off(negated))
        return node


def _cut_off(ratio: ast.BinOp) -> ast.expr:
    """The largest whole number that is not above a product with a float, or a quotient."""
    left, right = ratio.left, ratio.right
    if isinstance(ratio.op, ast.Div):
        return ast.BinOp(left, ast.FloorDiv(), right)
    if not isinstance(ratio.op, ast.Mult):
        raise _UnknownError
    if isinstance(right, ast.Constant):
        left, right = right, left
    if not isinstance(left, ast.Constant) or not isinstance(left.value, float) or not 0 < left.value < _PERIOD:
        raise _UnknownError
    numerator, denominator = left.value.as_integer_ratio()
    if denominator > _PERIOD:
        raise _UnknownError
    multiple = ast.BinOp(ast.Constant(numerator), ast.Mult(), right)
    return multiple if denominator == 1 else ast.BinOp(multiple, ast.FloorDiv(), ast.Constant(denominator))


def _check_depth(tree: ast.expr) -> None:
    nodes: list[ast.AST] = [tree]
    for _ in range(_DEPTH):
        nodes = [child for node in nodes for child in ast.iter_child_nodes(node)]
    if nodes:
        raise _UnknownError


def _trimmed(a: tuple[int, ...]) -> Polynomial:
    return a if not a or a[-1] else _trimmed(a[:-1])


def _minus(a: Polynomial, b: Polynomial) -> Polynomial:
    length = max(len(a), len(b))
    pad = (0,) * length
    return _trimmed(tuple(x - y for x, y in zip((a + pad)[:length], (b + pad)[:length], strict=True)))


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    product = [0] * (len(a) + len(b))
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product[i + j] += x * y
    return _trimmed(tuple(product))
