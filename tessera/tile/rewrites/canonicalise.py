"""Local rewrites to one plain form.

In: a kernel. Out: the same kernel, changed in place, storing the same values bit for bit: constants computed,
operations that do nothing gone, casts that lose nothing joined, positions written as index expressions (so that a
gather by `iota` becomes a plain load), masks that always or never hold removed. What is left unused is for `dce`.

A value is replaced only by one of the same type, so that no operation's axes change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from xdsl.dialects.builtin import BFloat16Type, Float16Type, Float32Type, Float64Type, IntegerType, Signedness
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.pattern_rewriter import (
    GreedyRewritePatternApplier,
    PatternRewriter,
    PatternRewriteWalker,
    RewritePattern,
    op_type_rewrite_pattern,
)

from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.functions import FUNCTIONS
from tessera.tile.dialect.index import Index, gathered
from tessera.tile.dialect.ops import ApplyOp, CastOp, IotaOp, KernelOp, LoadOp, StoreOp, axes_used
from tessera.tile.dialect.types import axes_of, element_of, index_attr
from tessera.tile.rewrites.identities import RULES, Site
from tessera.tile.rewrites.numbers import Number, constant_op, number_of

I1, I64 = IntegerType(1), IntegerType(64)


def canonicalise(kernel: KernelOp) -> None:
    """Apply every rewrite until none applies."""
    patterns = [
        FoldApply(),
        ApplyIdentities(),
        FoldPositions(),
        FoldCast(),
        JoinCasts(),
        InlinePositions(),
        KnownMask(),
    ]
    PatternRewriteWalker(GreedyRewritePatternApplier(patterns)).rewrite_region(kernel.body)


def _replace(op: Operation, rewriter: PatternRewriter, new: SSAValue) -> bool:
    """Use `new` instead of the operation's result, if it is of the same type."""
    if new.type != op.results[0].type:
        return False
    rewriter.replace(op, [], [new])
    return True


def _replace_by_number(op: Operation, rewriter: PatternRewriter, number: Number) -> None:
    if not axes_of(op.results[0]):
        rewriter.replace(op, constant_op(number, element_of(op.results[0])))


# --- elementwise functions ---


class FoldApply(RewritePattern):
    """A function of constants is a constant."""

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: ApplyOp, rewriter: PatternRewriter) -> None:
        numbers = [number_of(v) for v in op.args]
        if axes_of(op.result) or any(n is None for n in numbers):
            return
        args = [torch.tensor(n, dtype=torch_dtype(element_of(v))) for n, v in zip(numbers, op.args, strict=True)]
        try:
            value = FUNCTIONS[op.fn.data].reference(*args).to(torch_dtype(element_of(op.result)))
        except (RuntimeError, ZeroDivisionError):  # an integer divided by zero: left for the machine
            return
        _replace_by_number(op, rewriter, value.item())


class ApplyIdentities(RewritePattern):
    """The table in `identities`."""

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: ApplyOp, rewriter: PatternRewriter) -> None:
        for rule in RULES.get(op.fn.data, ()):
            new = rule(Site(op, rewriter), *op.args)
            if new is not None and _replace(op, rewriter, new):
                return


# --- positions ---


def position(v: SSAValue) -> Index | None:
    """The index expression a value is: an i64 constant, or an iota that gathers nothing."""
    if element_of(v) != I64:
        return None
    if isinstance(v.owner, IotaOp) and not v.owner.indices:
        return v.owner.at.expr
    number = number_of(v)
    return Index.of(number) if isinstance(number, int) else None


class FoldPositions(RewritePattern):
    """Sums and products of positions are positions; a position that is a number is a constant.

    Not with huge factors: those are hashes that wrap around, which an index expression never does.
    """

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: ApplyOp | IotaOp, rewriter: PatternRewriter) -> None:
        if isinstance(op, IotaOp):
            number = op.at.expr.constant
            if number is not None and -(2**63) <= number < 2**63:
                _replace_by_number(op, rewriter, number)
            return
        if op.fn.data not in ("add", "sub", "mul") or element_of(op.result) != I64:
            return
        a, b = (position(v) for v in op.args)
        if a is None or b is None:
            return
        expr = {"add": a.__add__, "sub": a.__sub__, "mul": a.__mul__}[op.fn.data](b)
        if _axes(op, expr, ()) == axes_of(op.result) and all(abs(c) < 2**31 for _, c in expr.terms):
            properties = {"at": index_attr(expr)}
            rewriter.replace(op, IotaOp(operands=[[]], properties=properties, result_types=[op.result.type]))


class InlinePositions(RewritePattern):
    """A gathered index that is a position becomes part of the expression."""

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: LoadOp | StoreOp | IotaOp, rewriter: PatternRewriter) -> None:
        known = {k: expr for k, v in enumerate(op.indices) if (expr := position(v)) is not None}
        if not known:
            return
        left = [k for k in range(len(op.indices)) if k not in known]
        names: dict[str, Index | int] = {f"_{k}": expr for k, expr in known.items()}
        names |= {f"_{k}": gathered(new) for new, k in enumerate(left)}
        expr = op.at.expr.substitute(names)
        indices = [op.indices[k] for k in left]
        if isinstance(op, StoreOp):
            # The points a store visits are those of its expression and its values: none may get lost.
            before = _axes(op, op.at.expr, [*op.indices, op.value, *_optional(op.mask)])
            if before != _axes(op, expr, [*indices, op.value, *_optional(op.mask)]):
                return
        elif _axes(op, expr, [*indices, *_beside(op)]) != axes_of(op.result):
            return
        rewriter.replace(op, _with_indices(op, expr, indices))


def _with_indices(op: LoadOp | StoreOp | IotaOp, expr: Index, indices: list[SSAValue]) -> Operation:
    match op:
        case LoadOp():
            operands, properties = [op.buffer, indices, op.mask, op.other], {"at": index_attr(expr)}
            return LoadOp(operands=operands, properties=properties, result_types=[op.result.type])
        case StoreOp():
            properties = {"at": index_attr(expr), "mode": op.mode}
            return StoreOp(operands=[op.value, op.buffer, indices, op.mask], properties=properties)
        case _:
            return IotaOp(operands=[indices], properties={"at": index_attr(expr)}, result_types=[op.result.type])


def _optional(*values: SSAValue | None) -> list[SSAValue]:
    return [v for v in values if v is not None]


def _beside(op: LoadOp | IotaOp) -> list[SSAValue]:
    return _optional(op.mask, op.other) if isinstance(op, LoadOp) else []


def _axes(op: Operation, expr: Index, values: Sequence[SSAValue]) -> tuple[str, ...]:
    kernel = op.parent_op()
    assert isinstance(kernel, KernelOp)
    return axes_used(kernel.axis_names(), expr, values)


# --- casts ---


class FoldCast(RewritePattern):
    """A constant of another type is a constant."""

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: CastOp, rewriter: PatternRewriter) -> None:
        number = number_of(op.arg)
        if number is None or _undefined(number, element_of(op.result)):
            return
        value = torch.tensor(number, dtype=torch_dtype(element_of(op.arg))).to(torch_dtype(element_of(op.result)))
        _replace_by_number(op, rewriter, value.item())


def _undefined(number: Number, element: Attribute) -> bool:
    """Machines differ in what integer a float out of range becomes."""
    if not isinstance(number, float) or not isinstance(element, IntegerType) or element == I1:
        return False
    bounds = torch.iinfo(torch_dtype(element))
    return not bounds.min <= number <= bounds.max


class JoinCasts(RewritePattern):
    """cast(x, x's type) -> x; cast(cast(x, wider), t) -> cast(x, t); cast(cast(x, i32), i8) -> cast(x, i8)."""

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: CastOp, rewriter: PatternRewriter) -> None:
        if _replace(op, rewriter, op.arg):
            return
        inner = op.arg.owner
        if not isinstance(inner, CastOp):
            return
        first, middle, last = element_of(inner.arg), element_of(op.arg), element_of(op.result)
        if holds_all(first, middle) or truncates(first, middle, last):
            rewriter.replace(op, CastOp(operands=[inner.arg], result_types=[op.result.type]))


# A float holds whole numbers up to two to this power; its widest exponent; in order of range and precision.
_DIGITS: dict[Attribute, int] = {BFloat16Type(): 8, Float16Type(): 11, Float32Type(): 24, Float64Type(): 53}
_WIDER: dict[Attribute, tuple[Attribute, ...]] = {
    BFloat16Type(): (Float32Type(), Float64Type()),
    Float16Type(): (Float32Type(), Float64Type()),
    Float32Type(): (Float64Type(),),
}


def holds_all(narrow: Attribute, wide: Attribute) -> bool:
    """Every number of one type is also one of the other."""
    if not isinstance(narrow, IntegerType):
        return wide == narrow or wide in _WIDER.get(narrow, ())
    bits = narrow.width.data - (0 if narrow == I1 or _unsigned(narrow) else 1)  # of the largest magnitude
    if wide in _DIGITS:
        return bits <= _DIGITS[wide]
    if not isinstance(wide, IntegerType) or wide == I1:
        return wide == narrow
    if _unsigned(wide):
        return (_unsigned(narrow) or narrow == I1) and bits <= wide.width.data
    return bits <= wide.width.data - 1


def truncates(first: Attribute, middle: Attribute, last: Attribute) -> bool:
    """Both steps drop high bits; i1 is not among them, for a cast to it asks whether the number is zero."""
    if not all(isinstance(t, IntegerType) and t != I1 for t in (first, middle, last)):
        return False
    assert isinstance(middle, IntegerType) and isinstance(last, IntegerType)
    return last.width.data <= middle.width.data


def _unsigned(t: IntegerType) -> bool:
    return t.signedness.data == Signedness.UNSIGNED


# --- masks ---


class KnownMask(RewritePattern):
    """A mask that always holds goes; a store whose mask never holds goes, a load becomes its other value."""

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: LoadOp | StoreOp, rewriter: PatternRewriter) -> None:
        known = None if op.mask is None else number_of(op.mask)
        if known is None:
            return
        if isinstance(op, StoreOp):
            if not known:
                rewriter.erase(op)
                return
            operands, properties = [op.value, op.buffer, list(op.indices), None], {"at": op.at, "mode": op.mode}
            rewriter.replace(op, StoreOp(operands=operands, properties=properties))
        elif known:
            if _axes(op, op.at.expr, op.indices) == axes_of(op.result):  # `other` varied over no axis of its own
                operands = [op.buffer, list(op.indices), None, None]
                rewriter.replace(op, LoadOp(operands=operands, properties={"at": op.at}, result_types=[op.result.type]))
        elif op.other is not None:
            _replace(op, rewriter, op.other)
        else:
            _replace_by_number(op, rewriter, 0)
