"""Products of matrices and vectors: linear, matmul and its special shapes, add-and-multiply, einsum.

Backward launches the kernels that eager launches and no more: operands are folded to two dimensions (or to
three, for `bmm`) by views, and where folding has to copy, the copy made in forward is the one backward reads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.types import Size, size_hint
from tessera.ops.families import expand_to, fit, pad_rank, product, same_shape, sum_to, times, total
from tessera.ops.op import declare

Rule = Generator[Value, Value, tuple]


def t(x: Value) -> Value:
    """The matrix, or every matrix of the batch, transposed."""
    return aten.t(x) if x.ndim == 2 else aten.transpose(x, -2, -1)


def fold(x: Value) -> Value:
    """All dimensions but the last made one; a view wherever the strides allow."""
    return x if x.ndim == 2 else aten.reshape(x, [product(x.shape[:-1]), x.shape[-1]])


def unfold(x: Value, shape: Sequence[Size]) -> Value:
    return x if same_shape(x.shape, shape) else aten.reshape(x, list(shape))


def outer(a: Value, b: Value) -> Value:
    return aten.unsqueeze(a, -1) * b


# --- cost -----------------------------------------------------------------------------------------


def product_cost(left: int) -> Callable[[Equation], float]:
    """Two flops for every element of the result and every term of its sum; argument `left` is summed over."""

    def cost(eqn: Equation) -> float:
        a = eqn.args[left]
        assert isinstance(a, Value)
        terms = size_hint(a.shape[-1]) if a.ndim else 1
        return 2.0 * terms * eqn.out.tensor.numel()

    return cost


# --- batching: every product is a matmul of padded operands ----------------------------------------


def batch_matmul(size: Size, on: Sequence[object], a: Value, b: Value, *rest: Arg) -> Value:
    ranks = a.ndim - bool(on[0]), b.ndim - bool(on[1])
    if not on[1] and ranks[1] <= 2:  # a few more rows for the same matrix
        return aten.matmul(a, b)
    if ranks[0] == 1:
        a = aten.unsqueeze(a, -2)
    if ranks[1] == 1:
        b = aten.unsqueeze(b, -1)
    rank = max(2, *ranks)
    a = pad_rank(a, rank + 1) if on[0] else a
    b = pad_rank(b, rank + 1) if on[1] else b
    y = aten.matmul(a, b)
    if ranks[1] == 1:
        y = aten.squeeze(y, -1)
    return aten.squeeze(y, -2 if ranks[1] != 1 else -1) if ranks[0] == 1 else y


def batch_add_product(
    size: Size, on: Sequence[object], c: Value, a: Value, b: Value, *, beta: Arg = 1, alpha: Arg = 1
) -> Value:
    y = batch_matmul(size, on[1:], a, b) if any(on[1:3]) else aten.matmul(a, b)
    rank = y.ndim - bool(any(on[1:3]))
    y = times(y, alpha) if any(on[1:3]) else aten.unsqueeze(times(y, alpha), 0)
    return times(pad_rank(c, rank + 1) if on[0] else c, beta) + y


def batch_linear(size: Size, on: Sequence[object], x: Value, w: Value, b: Value | None) -> Value:
    if not on[1]:
        if b is None or not on[2]:
            return aten.linear(x, w, b)
        y = aten.linear(x, w) if on[0] else aten.unsqueeze(aten.linear(x, w), 0)
        return y + pad_rank(b, y.ndim)
    rank = x.ndim - bool(on[0])
    one = w.ndim == 2  # a batch of vectors
    w = aten.unsqueeze(w, 1) if one else w
    lead = list(x.shape[1:-1] if on[0] else x.shape[:-1])
    rows = aten.reshape(x, [*x.shape[: bool(on[0])], product(lead), x.shape[-1]]) if rank != 2 else x
    y = aten.matmul(rows, aten.transpose(w, 1, 2))
    if b is not None:
        y = y + (pad_rank(b, 3) if on[2] else b)
    return unfold(y, [y.shape[0], *lead, *([] if one else [y.shape[-1]])])


def batch_outer(size: Size, on: Sequence[object], a: Value, b: Value) -> Value:
    return aten.unsqueeze(a, -1) * (aten.unsqueeze(b, -2) if on[1] else b)


# --- tangents: products are linear in each factor ---------------------------------------------------


def jvp_product(op: Callable) -> Callable:
    def jvp(ts: Sequence[Value | None], y: Value, a: Value, b: Value) -> Value:
        ta, tb = ts[:2]
        return total([None if ta is None else op(ta, b), None if tb is None else op(a, tb)])

    return jvp


def jvp_add_product(op: Callable) -> Callable:
    """The addend's tangent joins the first product, as in the operator itself."""

    def jvp(
        ts: Sequence[Value | None], y: Value, c: Value, a: Value, b: Value, *, beta: Arg = 1, alpha: Arg = 1
    ) -> Value:
        tc, ta, tb = ts[:3]
        out = None if tc is None else fit(times(tc, beta), y)
        for left, right in ((ta, b), (a, tb)):
            if left is None or right is None:
                continue
            out = times(aten.matmul(left, right), alpha) if out is None else op(out, left, right, alpha=alpha)
        assert out is not None
        return out

    return jvp


def jvp_linear(ts: Sequence[Value | None], y: Value, x: Value, w: Value, b: Value | None) -> Value:
    tx, tw, tb = ts[:3]
    if tx is not None:
        out = aten.linear(tx, w, tb)
        return out if tw is None else out + aten.linear(x, tw)
    if tw is not None:
        return aten.linear(x, tw, tb)
    assert tb is not None
    return expand_to(tb, y.shape)


# --- cotangents -------------------------------------------------------------------------------------


def vjp_linear(ct: Value, y: Value, x: Value, w: Value, b: Value | None) -> tuple:
    if w.ndim == 1:
        flat = unfold(ct, [product(ct.shape)])
        return (
            lambda: outer(ct, w),
            lambda: aten.mv(aten.t(fold(x)), flat),
            lambda: sum_to(ct, b),  # type: ignore[arg-type]
        )
    rows = fold(ct)
    return (
        lambda: unfold(aten.mm(rows, w), x.shape),
        lambda: aten.mm(aten.t(rows), fold(x)),
        lambda: sum_to(rows, b) if b is not None else None,
    )


def vjp_mm(ct: Value, y: Value, a: Value, b: Value) -> tuple:
    return (lambda: aten.mm(ct, t(b)), lambda: aten.mm(t(a), ct))


def vjp_bmm(ct: Value, y: Value, a: Value, b: Value) -> tuple:
    return (lambda: aten.bmm(ct, t(b)), lambda: aten.bmm(t(a), ct))


def vjp_mv(ct: Value, y: Value, a: Value, b: Value) -> tuple:
    return (lambda: outer(ct, b), lambda: aten.mv(t(a), ct))


def vjp_dot(ct: Value, y: Value, a: Value, b: Value) -> tuple:
    return (lambda: ct * b, lambda: ct * a)


def vjp_outer(ct: Value, y: Value, a: Value, b: Value) -> tuple:
    return (lambda: aten.mv(ct, b), lambda: aten.mv(t(ct), a))


def vjp_add_product(vjp: Callable) -> Callable:
    def rule(ct: Value, y: Value, c: Value, a: Value, b: Value, *, beta: Arg = 1, alpha: Arg = 1) -> tuple:
        left, right = vjp(ct, y, a, b)
        return (lambda: sum_to(times(ct, beta), c), lambda: times(left(), alpha), lambda: times(right(), alpha))

    return rule


def forward_matmul(need: Sequence[object], a: Value, b: Value) -> Rule:
    """Each pair of ranks becomes the one product that eager would launch."""
    match a.ndim, b.ndim:
        case 1, 1:
            ct = yield aten.dot(a, b)
            return vjp_dot(ct, ct, a, b)
        case 1, 2:
            row = aten.unsqueeze(a, 0)
            ct = aten.unsqueeze((yield aten.squeeze(aten.mm(row, b), 0)), 0)
            return (lambda: aten.squeeze(aten.mm(ct, t(b)), 0), lambda: aten.mm(t(row), ct))
        case 2, 1:
            ct = yield aten.mv(a, b)
            return vjp_mv(ct, ct, a, b)
        case 2, 2:
            ct = yield aten.mm(a, b)
            return vjp_mm(ct, ct, a, b)
        case _, 1:
            rows = fold(a)
            y = aten.mv(rows, b)
            ct = unfold((yield unfold(y, a.shape[:-1])), y.shape)
            return (lambda: unfold(outer(ct, b), a.shape), lambda: aten.mv(t(rows), ct))
        case _, 2:
            rows = fold(a)
            y = aten.mm(rows, b)
            ct = unfold((yield unfold(y, [*a.shape[:-1], b.shape[-1]])), y.shape)
            return (lambda: unfold(aten.mm(ct, t(b)), a.shape), lambda: aten.mm(t(rows), ct))
        case 3, 3:
            ct = yield aten.bmm(a, b)
            return vjp_bmm(ct, ct, a, b)
        case _:
            lead = product(a.shape[:-2])
            a3, b3 = (aten.reshape(x, [lead, *x.shape[-2:]]) for x in (a, b))
            y = aten.bmm(a3, b3)
            ct = aten.reshape((yield aten.reshape(y, [*a.shape[:-2], *y.shape[1:]])), list(y.shape))
            return (
                lambda: aten.reshape(aten.bmm(ct, t(b3)), list(a.shape)),
                lambda: aten.reshape(aten.bmm(t(a3), ct), list(b.shape)),
            )


def one_product(eqn: Equation) -> bool:
    """No operand is stretched over a batch: eager copies those, and PyTorch's formula keeps the copies."""
    a, b = eqn.args[:2]
    assert isinstance(a, Value) and isinstance(b, Value)
    return b.ndim <= 2 or (a.ndim > 2 and same_shape(a.shape[:-2], b.shape[:-2]))


# --- einsum -----------------------------------------------------------------------------------------


def jvp_einsum(ts: Sequence[object], y: Value, equation: str, operands: list[Value], *, path: Arg = None) -> Value:
    moved = []
    for index, tangent in enumerate(ts[1] or []):  # type: ignore[arg-type,var-annotated]
        if tangent is not None:
            swapped = [tangent if i == index else x for i, x in enumerate(operands)]
            moved.append(aten.einsum(equation, swapped, path=path))
    return total(moved)


def batch_einsum(size: Size, on: Sequence[object], equation: str, operands: list[Value], *, path: Arg = None) -> Value:
    """The batch is one more letter, in front of every operand that carries it."""
    equation = equation.replace(" ", "")
    terms, arrow, result = equation.partition("->")
    letters = terms.replace("...", "").replace(",", "")
    if not arrow:
        once = sorted(c for c in set(letters) if letters.count(c) == 1)
        result = ("..." if "..." in terms else "") + "".join(once)
    used = set(letters)
    letter = next(c for c in "zyxwvutsrqponmlkjihgfedcbaZYXWVUTSRQPONMLKJIHGFEDCBA" if c not in used)
    carries = on[1] if isinstance(on[1], (list, tuple)) else [on[1]] * len(operands)
    lifted = [letter + term if c else term for term, c in zip(terms.split(","), carries, strict=True)]
    return aten.einsum(f"{','.join(lifted)}->{letter}{result}", operands, path=path)


def cost_einsum(eqn: Equation) -> float:
    """Two flops for every point of the space that all letters span."""
    terms = str(eqn.args[0]).replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, x in zip(terms, eqn.args[1], strict=True):  # type: ignore[call-overload]
        shape = x.shape if "..." not in term else x.shape[x.ndim - len(term.replace("...", "")) :]
        for letter, s in zip(term.replace("...", ""), shape, strict=False):
            sizes[letter] = max(sizes.get(letter, 1), size_hint(s))
    points = 1.0
    for s in sizes.values():
        points *= s
    return 2.0 * points


def _declare() -> None:
    def family(name: str, **rules: object) -> None:
        declare(f"aten.{name}", "matmul", **rules)

    common = {"batch": batch_matmul, "cost": product_cost(0)}
    family("linear.default", vjp=vjp_linear, jvp=jvp_linear, batch=batch_linear, cost=product_cost(0))
    family("matmul.default", forward=forward_matmul, applies=one_product, jvp=jvp_product(aten.matmul), **common)
    family("mm.default", vjp=vjp_mm, jvp=jvp_product(aten.mm), **common)
    family("bmm.default", vjp=vjp_bmm, jvp=jvp_product(aten.bmm), **common)
    family("mv.default", vjp=vjp_mv, jvp=jvp_product(aten.mv), **common)
    family("dot.default", vjp=vjp_dot, jvp=jvp_product(aten.dot), **common)
    for name in ("outer.default", "ger.default"):
        family(name, vjp=vjp_outer, jvp=jvp_product(aten.outer), batch=batch_outer)
    added = {"batch": batch_add_product, "cost": product_cost(1)}
    for name, vjp, op in (
        ("addmm.default", vjp_mm, aten.addmm),
        ("baddbmm.default", vjp_bmm, aten.baddbmm),
        ("addmv.default", vjp_mv, aten.addmv),
    ):
        family(name, vjp=vjp_add_product(vjp), jvp=jvp_add_product(op), **added)
    family("einsum.default", jvp=jvp_einsum, batch=batch_einsum, cost=cost_einsum)


_declare()
