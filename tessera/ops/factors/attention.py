"""Sharding rules of attention: batch and heads may be cut, and the sequence by exchanging.

Queries and keys of one sequence are one factor. It must be whole, but where an axis has split it there are two ways:
heads are cut instead, so that operands are re-laid by all-to-alls and results go back (Ulysses); or, along an axis that
the plan calls a ring, keys and values go round (`ring`). Of grouped heads the groups are cut.
"""

from __future__ import annotations

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.types import size_key
from tessera.ops.factors.ring import ring_attention, ring_backward
from tessera.ops.factors.rule import Dims, Factors, apart, arguments, rule, tensors

KERNELS = "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu"
BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


def _sizes(q: Value, k: Value, v: Value) -> dict | None:
    """The sizes of heads of keys and of the queries' heads that share one; None where they do not fit."""
    heads, pairs = q.shape[1], k.shape[1]
    if not isinstance(heads, int) or not isinstance(pairs, int) or size_key(v.shape[1]) != pairs or heads % pairs:
        return {"h": heads} if size_key(heads) == size_key(pairs) == size_key(v.shape[1]) else None
    return {"h": pairs, "g": heads // pairs}


def _mask(mask: Value, q: Value, keys: str, own: Dims) -> Dims:
    """A mask is broadcast against queries and keys."""
    dims = [("b",), own[1], own[2], (keys,)]
    wide = [size_key(q.shape[0]), size_key(q.shape[1]), size_key(q.shape[2]), None]
    pairs = zip(dims[4 - mask.ndim :], wide[4 - mask.ndim :], mask.shape, strict=True)
    return tuple(dim if w is None or size_key(n) == w else () for dim, w, n in pairs)


def _attention(eqn: Equation, q: Value, k: Value, v: Value, mask: list[Value]) -> tuple[dict, Dims, Dims, Dims] | None:
    if q.ndim != 4 or k.ndim != 4 or arguments(eqn)["dropout_p"]:
        return None
    sizes = _sizes(q, k, v)
    if sizes is None:
        return None
    heads = ("h", "g") if sizes.get("g", 1) != 1 else ("h",)
    keys = "s" if size_key(q.shape[2]) == size_key(k.shape[2]) else "k"
    whole = {"s", "k", "e", "v"}
    around = {"s"} if keys == "s" and not mask else set()
    options = {"sizes": sizes, "whole": frozenset(whole), "instead": frozenset("h"), "around": frozenset(around)}
    return (
        options,
        (("b",), heads, ("s",), ("e",)),
        (("b",), ("h",), (keys,), ("e",)),
        (("b",), ("h",), (keys,), ("v",)),
    )


@rule(KERNELS)
def attention(eqn: Equation) -> Factors | None:
    q, k, v, *mask = tensors(eqn)
    known = _attention(eqn, q, k, v, mask)
    if known is None:
        return None
    options, dq, dk, dv = known
    out = (*dq[:3], ("v",))
    masks = [_mask(m, q, dk[2][0], dq) for m in mask]
    results = (out,) if len(eqn.outputs) == 1 else (out, dq[:3])
    return Factors((dq, dk, dv, *masks), results, local=ring_attention, **options)


@rule(BACKWARD)
def attention_backward(eqn: Equation) -> Factors | None:
    ct, q, k, v, out, lse, *mask = tensors(eqn)
    known = _attention(eqn, q, k, v, mask)
    if known is None:
        return None
    options, dq, dk, dv = known
    given = (*dq[:3], ("v",))
    masks = [_mask(m, q, dk[2][0], dq) for m in mask]
    return Factors((given, dq, dk, dv, given, dq[:3], *masks), (dq, dk, dv), local=ring_backward, **options)


# --- fewer heads of keys than ranks ---------------------------------------------------------------


def _repeated(x: Value, times: int) -> Value:
    b, h, s, e = x.shape
    return aten.reshape(aten.expand(aten.unsqueeze(x, 2), [b, h, times, s, e]), [b, h * times, s, e])  # type: ignore[operator]


def _added(x: Value, times: int) -> Value:
    b, h, s, e = x.shape
    return aten.sum(aten.reshape(x, [b, h // times, times, s, e]), [2])  # type: ignore[operator]


@apart(KERNELS)
def one_head_each(eqn: Equation) -> object:
    """Every head of queries gets its own keys and values."""
    q, k, v, *_ = tensors(eqn)
    sizes = _sizes(q, k, v) if q.ndim == 4 else None
    if sizes is None or sizes.get("g", 1) == 1:
        return None
    own = {k: _repeated(k, sizes["g"]), v: _repeated(v, sizes["g"])}
    here = eqn.substitute(own)
    keyword = {name: a for name, a in here.kwargs.items() if name != "enable_gqa"}
    return getattr(aten, eqn.opname)(*here.args, **keyword)


@apart(BACKWARD)
def one_head_each_backward(eqn: Equation) -> object:
    _, q, k, v, *_ = tensors(eqn)
    sizes = _sizes(q, k, v) if q.ndim == 4 else None
    if sizes is None or sizes.get("g", 1) == 1:
        return None
    own = {k: _repeated(k, sizes["g"]), v: _repeated(v, sizes["g"])}
    here = eqn.substitute(own)
    dq, dk, dv = getattr(aten, eqn.opname)(*here.args, **here.kwargs)
    return [dq, _added(dk, sizes["g"]), _added(dv, sizes["g"])]
