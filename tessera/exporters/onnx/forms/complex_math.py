"""Complex numbers, continued: operators that do the same to both parts, products of matrices, and functions.

As in `complex.py`, real and imaginary parts lie in a last dimension of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tessera.exporters.onnx.forms.common import need
from tessera.exporters.onnx.forms.complex import joined, part
from tessera.exporters.onnx.graph import Graph, Ref, real_parts
from tessera.exporters.onnx.registry import declared_forms, form
from tessera.util.names import names

# What moves or adds elements, whatever they are: the operator over real numbers, once for each part.
_MOVES = names(
    """
    flip roll index_select index.Tensor gather scatter.src scatter_add index_put index_add where stack unbind.int
    split.Tensor split_with_sizes repeat tile cumsum tril triu diagonal unfold repeat_interleave.self_int movedim
    select_scatter slice_scatter index_copy
    """
)


def _by_parts(name: str) -> Callable[..., Any]:
    def write(g: Graph, *args: Any, **kwargs: Any) -> Any:
        kind, results = g.result, g.results
        need(kind.dtype.is_complex)
        try:
            g.result = replace(kind, dtype=kind.dtype.to_real())
            g.results = [t and replace(t, dtype=t.dtype.to_real()) for t in results]
            real, imaginary = (_real_form(g, name, *_parts(g, (args, kwargs), i)) for i in (0, 1))
        finally:
            g.result, g.results = kind, results
        both = zip(real, imaginary, results, strict=True)
        out = [None if t is None else joined(g, a, b, t.shape) for a, b, t in both]
        return out if len(out) > 1 else out[0]

    return write


def _real_form(g: Graph, name: str, args: tuple, kwargs: dict) -> list[Ref]:
    forms = declared_forms((name, name.partition(".")[0]), g.opset)
    need(bool(forms))
    out = forms[0](g, *args, **kwargs)
    return list(out) if isinstance(out, (list, tuple)) else [out]


def _parts(g: Graph, tree: Any, which: int) -> Any:
    """Arguments with their real, or their imaginary, parts in place of complex tensors."""
    if isinstance(tree, Ref):  # a real tensor among them has imaginary parts of zero; whole numbers are places
        return part(g, tree, which) if tree.dtype.is_complex or tree.is_float else tree
    if isinstance(tree, dict):
        return {k: _parts(g, v, which) for k, v in tree.items()}
    return type(tree)(_parts(g, x, which) for x in tree) if type(tree) in (list, tuple) else tree


for _name in _MOVES:
    form(f"complex.{_name}")(_by_parts(_name))


@form("complex.prims.rev")
def rev(g: Graph, x: Ref, dims: object) -> Ref:
    return _by_parts("flip")(g, x, dims)


@form("complex.zeros complex.zeros_like complex.new_zeros")
def zeros(g: Graph, *_: object, **__: object) -> Ref:
    return full(g, None, 0)


@form("complex.ones complex.ones_like complex.new_ones")
def ones(g: Graph, *_: object, **__: object) -> Ref:
    return full(g, None, 1)


@form("complex.scalar_tensor")
def scalar_tensor(g: Graph, number: object, **_: object) -> Ref:
    return full(g, None, number)


@form("complex.full complex.full_like")
def full(g: Graph, _: object, number: object, **__: object) -> Ref:
    need(isinstance(number, (int, float, complex)))
    shape = g.result.shape
    one = g.tensor(torch.full((1,) * len(shape), number, dtype=g.result.dtype))  # type: ignore[arg-type]
    return Ref(g.expand(real_parts(one), [*shape, 2]).name, g.result.dtype, shape)


# --- arithmetic ---


def _both(g: Graph, x: object) -> tuple[Ref, Ref]:
    """The parts of a tensor or number."""
    kind = g.result.dtype.to_real() if g.result.dtype.is_complex else torch.float32
    if isinstance(x, Ref):
        wide = x if x.dtype.is_complex else g.cast(x, kind)
        return part(g, wide, 0), part(g, wide, 1)
    number = complex(x)  # type: ignore[arg-type]
    return g.full(number.real, kind), g.full(number.imag, kind)


def _product(g: Graph, kind: str, a: tuple[Ref, Ref], b: tuple[Ref, Ref]) -> Ref:
    (ar, ai), (br, bi) = a, b
    real = g.op("Sub", g.op(kind, ar, br), g.op(kind, ai, bi))
    imaginary = g.op("Add", g.op(kind, ar, bi), g.op(kind, ai, br))
    return _joined(g, real, imaginary)


def _joined(g: Graph, real: Ref, imaginary: Ref) -> Ref:
    shape = g.result.shape
    return joined(g, _shaped(g, real), _shaped(g, imaginary), shape)


def _shaped(g: Graph, x: Ref) -> Ref:
    """Brought to the result's shape, where it is broadcast with what the other part is made of."""
    return x if x.shape is None else g.expand(x, g.result.shape)


@form("complex.mm complex.bmm complex.matmul complex.mv complex.dot")
def matmul(g: Graph, a: Ref, b: Ref) -> Ref:
    need(g.result.dtype == torch.complex64)
    return _product(g, "MatMul", _both(g, a), _both(g, b))


@form("complex.mul")
def mul(g: Graph, a: Ref, b: object) -> Ref:
    need(g.result.dtype == torch.complex64)
    return _product(g, "Mul", _both(g, a), _both(g, b))


def _inverse(g: Graph, x: tuple[Ref, Ref]) -> tuple[Ref, Ref]:
    real, imaginary = x
    square = g.op("Add", g.op("Mul", real, real), g.op("Mul", imaginary, imaginary))
    return g.op("Div", real, square), g.op("Neg", g.op("Div", imaginary, square))


@form("complex.div.Tensor complex.div.Scalar complex.div.default")
def div(g: Graph, a: Ref, b: object) -> Ref:
    need(g.result.dtype == torch.complex64)
    if not isinstance(b, complex) and not (isinstance(b, Ref) and b.dtype.is_complex):
        by = _both(g, b)[0]
        real, imaginary = _both(g, a)
        return _joined(g, g.op("Div", real, by), g.op("Div", imaginary, by))
    return _product(g, "Mul", _both(g, a), _inverse(g, _both(g, b)))


@form("complex.reciprocal")
def reciprocal(g: Graph, x: Ref) -> Ref:
    return _joined(g, *_inverse(g, _both(g, x)))


def _sum(kind: str) -> Callable[..., Ref]:
    def write(g: Graph, a: object, b: object, alpha: object = 1) -> Ref:
        need(isinstance(alpha, (int, float)) and g.result.dtype == torch.complex64)
        pairs = [[g.op("Mul", x, g.full(alpha, x.dtype)) for x in _both(g, b)]] if alpha != 1 else [[*_both(g, b)]]
        return _joined(g, *(g.op(kind, x, y) for x, y in zip(_both(g, a), pairs[0], strict=True)))

    return write


form("complex.add")(_sum("Add"))
form("complex.sub")(_sum("Sub"))


@form("complex.rsub")
def rsub(g: Graph, a: Ref, b: object, alpha: object = 1) -> Ref:
    need(alpha == 1)
    return _sum("Sub")(g, b, a)


@form("complex.eq")
def equal(g: Graph, a: Ref, b: object) -> Ref:
    parts = zip(_both(g, a), _both(g, b), strict=True)
    return g.op("And", *(g.op("Equal", x, y, dtype=torch.bool) for x, y in parts))


@form("complex.ne")
def unequal(g: Graph, a: Ref, b: object) -> Ref:
    return g.op("Not", equal(g, a, b))


# --- functions ---


def _size(g: Graph, x: Ref) -> Ref:
    real, imaginary = _both(g, x)
    return g.op("Sqrt", g.op("Add", g.op("Mul", real, real), g.op("Mul", imaginary, imaginary)))


@form("complex.angle")
def angle(g: Graph, x: Ref) -> Ref:
    need(x.dtype.is_complex)
    real, imaginary = _both(g, x)
    return declared_forms(("atan2",), g.opset)[0](g, imaginary, real)


def _angle(g: Graph, x: Ref) -> Ref:
    kind, g.result = g.result, replace(g.result, dtype=x.dtype.to_real())
    try:
        return angle(g, x)
    finally:
        g.result = kind


def _polar(g: Graph, size: Ref, turn: Ref) -> Ref:
    return _joined(g, g.op("Mul", size, g.op("Cos", turn)), g.op("Mul", size, g.op("Sin", turn)))


@form("complex.exp")
def exp(g: Graph, x: Ref) -> Ref:
    real, imaginary = _both(g, x)
    return _polar(g, g.op("Exp", real), imaginary)


@form("complex.log")
def log(g: Graph, x: Ref) -> Ref:
    need(x.dtype.is_complex)
    return _joined(g, g.op("Log", _size(g, x)), _angle(g, x))


@form("complex.sqrt")
def sqrt(g: Graph, x: Ref) -> Ref:
    return power(g, x, 0.5)


@form("complex.pow.Tensor_Scalar")
def power(g: Graph, x: Ref, exponent: object) -> Ref:
    need(x.dtype.is_complex and isinstance(exponent, (int, float)))
    by = g.full(exponent, x.dtype.to_real())
    return _polar(g, g.op("Pow", _size(g, x), by), g.op("Mul", _angle(g, x), by))


def _waves(first: str, other: str, second: str, last: str, sign: str = "") -> Callable[..., Ref]:
    """`first(a) other(b) + i second(a) last(b)`, of a + ib."""

    def write(g: Graph, x: Ref) -> Ref:
        a, b = _both(g, x)
        imaginary = g.op("Mul", g.op(second, a), g.op(last, b))
        return _joined(g, g.op("Mul", g.op(first, a), g.op(other, b)), g.op(sign, imaginary) if sign else imaginary)

    return write


form("complex.sin")(_waves("Sin", "Cosh", "Cos", "Sinh"))
form("complex.cos")(_waves("Cos", "Cosh", "Sin", "Sinh", "Neg"))
form("complex.sinh")(_waves("Sinh", "Cos", "Cosh", "Sin"))
form("complex.cosh")(_waves("Cosh", "Cos", "Sinh", "Sin"))


@form("complex.tanh")
def tanh(g: Graph, x: Ref) -> Ref:
    """(sinh 2a + i sin 2b) / (cosh 2a + cos 2b), divided by cosh 2a, which may be too large a number."""
    a, b = (g.op("Mul", v, g.full(2, v.dtype)) for v in _both(g, x))
    wide = g.op("Cosh", a)
    whole = g.op("Add", g.full(1, a.dtype), g.op("Div", g.op("Cos", b), wide))
    return _joined(g, g.op("Div", g.op("Tanh", a), whole), g.op("Div", g.op("Div", g.op("Sin", b), wide), whole))
