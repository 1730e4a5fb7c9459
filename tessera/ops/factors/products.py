"""Sharding rules of products and convolutions."""

from __future__ import annotations

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.types import Size, size_key
from tessera.ops.factors.rule import Cut, Factors, factors, in_words, rule, tensors

EACH = ((0,), (1,))

factors("mm", "m k, k n -> m n", sums="k", linear=EACH)
factors("bmm", "b m k, b k n -> b m n", sums="k", linear=EACH)
factors("mv", "m k, k -> m", sums="k", linear=EACH)
factors("dot vdot", "k, k -> ", sums="k", linear=EACH)
factors("outer ger", "m, n -> m n", linear=EACH)
factors(
    "linear",
    "... k, n k -> ... n",
    "... k, n k, n -> ... n",
    sums="k",
    linear=((0,), (1,), (0, 2), (1, 2)),
    addends=(2,),
)


@rule("addmm addmv baddbmm addbmm")
def added(eqn: Equation) -> Factors | None:
    """`beta * c + alpha * a @ b`: the first operand is broadcast, and added by one rank."""
    c, _, _ = tensors(eqn)
    text = {"addmm": "m k, k n -> m n", "addmv": "m k, k -> m", "baddbmm": "b m k, b k n -> b m n"}.get(eqn.opname)
    if text is None:
        return None
    left, out = text.split(" -> ")
    names = out.split()[len(out.split()) - c.ndim :]
    shapes = zip(names, c.shape, eqn.out.shape[eqn.out.ndim - c.ndim :], strict=True)
    first = " ".join(name if str(n) == str(m) else "1" for name, n, m in shapes)
    return in_words(eqn, f"{first}, {left} -> {out}", sums="k", linear=((0, 1), (0, 2)), addends=(0,))


@rule("matmul")
def matmul(eqn: Equation) -> Factors | None:
    a, b = tensors(eqn)
    if a.ndim == 1 and b.ndim == 1:
        text = "k, k -> "
    elif b.ndim == 1:
        text = "... m k, k -> ... m"
    elif a.ndim == 1:
        text = "k, ... k n -> ... n"
    else:
        text = "... m k, ... k n -> ... m n"
    return in_words(eqn, text, sums="k", linear=EACH)


@rule("_scaled_mm")
def scaled_mm(eqn: Equation) -> Factors | None:
    """Scales are one for all, or one for each row and each column."""
    a, b, *scales = tensors(eqn)
    if len(scales) != 2:
        return None  # with a bias: it would be added on every rank
    rows, columns = scales
    left = _scale(rows, a.shape[0], "m 1", 0)
    right = _scale(columns, b.shape[1], "1 n", 1)
    return None if left is None or right is None else in_words(eqn, f"m k, k n, {left}, {right} -> m n", sums="k")


def _scale(scale: Value, size: Size, each: str, dim: int) -> str | None:
    """The dimensions of a scale."""
    if all(size_key(n) == 1 for n in scale.shape):
        return " ".join("1" for _ in scale.shape)
    fits = scale.ndim == 2 and size_key(scale.shape[dim]) == size_key(size) and size_key(scale.shape[1 - dim]) == 1
    return each if fits else None


def _spatial(rank: int) -> str:
    return " ".join(f"s{i}!" for i in range(rank))


def _out(rank: int) -> str:
    return " ".join(f"o{i}!" for i in range(rank))


def _kernel(rank: int) -> str:
    return " ".join(f"k{i}!" for i in range(rank))


@rule("convolution conv1d conv2d.default conv3d.default conv_transpose1d conv_transpose2d.input conv_transpose3d.input")
def convolution(eqn: Equation) -> Factors | None:
    positional, keyword = eqn.bound()
    x, w = tensors(eqn)[:2]
    n = w.ndim - 2
    groups = positional[8] if eqn.opname == "convolution" else positional[6]
    transposed = positional[6] if eqn.opname == "convolution" else "transpose" in eqn.opname
    if groups != 1 or x.ndim != n + 2:
        text = f"b c! {_spatial(n)}, f! g! {_kernel(n)}"
        text, bias, out = text, "f!", f"b f! {_out(n)}"
        if x.ndim != n + 2:
            return None
    else:
        weight = f"c f {_kernel(n)}" if transposed else f"f c {_kernel(n)}"
        text, bias, out = f"b c {_spatial(n)}, {weight}", "f", f"b f {_out(n)}"
    linear = ((0,), (1,), (0, 2), (1, 2))
    return in_words(eqn, f"{text} -> {out}", f"{text}, {bias} -> {out}", sums="c", linear=linear, addends=(2,))


@rule("convolution_backward")
def convolution_backward(eqn: Equation) -> Factors | None:
    positional, _ = eqn.bound()
    ct, x, w = tensors(eqn)
    n, groups, transposed = w.ndim - 2, positional[9], positional[7]
    if x.ndim != n + 2:
        return None
    whole = "!" if groups != 1 else ""
    rows, columns = ("c" + whole, "f" + whole) if transposed else ("f" + whole, ("g!" if groups != 1 else "c"))
    weight = f"{rows} {columns} {_kernel(n)}"
    left = f"b f{whole} {_out(n)}, b c{whole} {_spatial(n)}, {weight}"
    right = [f"b c{whole} {_spatial(n)}", weight, f"f{whole}"]
    there = [text if v is not None else "" for text, v in zip(right, eqn.outputs, strict=True)]
    words = f"{left} -> {', '.join(there)}"  # gradients that are not asked for are not there
    # What a bias gets is made of the cotangent alone.
    return in_words(eqn, words, sums="b f c", alike=((2, "c"),), linear=((0,),), local=_bias_of_part)


def _bias_of_part(eqn: Equation, cut: Cut) -> object:
    """An argument names the size of the bias: as many as a rank has channels of the result."""
    args = list(eqn.bound()[0])
    args[3] = None if args[3] is None else [args[0].shape[1]]
    return aten.convolution_backward(*args)
