"""Attention whose keys and values are repeated first, one head for several queries: the operator shares them itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tessera.exporters.onnx.forms.attention import NAME, attention
from tessera.exporters.onnx.graph import Ref, same
from tessera.exporters.onnx.patterns.makers import Makers
from tessera.ir.equation import Arg, Equation, Value

if TYPE_CHECKING:
    from tessera.exporters.onnx.lower import Lowering


def shared_heads(eqn: Equation, makers: Makers) -> Callable[[Lowering], Ref] | None:
    if eqn.opname != NAME:
        return None
    (q, k, v, *rest), keywords = eqn.bound()
    keys, values = _before_repeat(k, makers), _before_repeat(v, makers)
    if keys is None or values is None or not same(keys.shape[1], values.shape[1]):
        return None

    def write(lowering: Lowering) -> Ref:
        given = lowering.refs((q, keys, values, *rest))
        return attention(lowering.g, *given, **{**lowering.refs(keywords), "enable_gqa": True})  # type: ignore[misc]

    return write


def _before_repeat(v: Arg, makers: Makers) -> Value | None:
    """`x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)`."""
    joined = makers.of(v, "reshape", "view", "_unsafe_view", "flatten")
    expand = None if joined is None else makers.of(joined.args[0], "expand")
    unsqueeze = None if expand is None else makers.of(expand.args[0], "unsqueeze")
    if joined is None or expand is None or unsqueeze is None or unsqueeze.args[1] not in (2, -3):
        return None
    x, wide, out = unsqueeze.args[0], expand.out.shape, joined.out.shape
    assert isinstance(x, Value)
    if (
        len(x.shape) != 4
        or len(wide) != 5
        or len(out) != 4
        or not all(isinstance(n, int) for n in (*wide[1:3], out[1]))
    ):
        return None
    kept = all(same(a, b) for a, b in zip(x.shape, (*wide[:2], *wide[3:]), strict=True))
    joins = out[1] == wide[1] * wide[2] and all(map(same, out[2:], wide[3:]))
    return x if kept and joins else None
