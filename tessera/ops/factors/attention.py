"""Sharding rules of attention: batch and heads may be cut; queries too, where nothing depends on their place."""

from __future__ import annotations

from tessera.ir.equation import Equation, Value
from tessera.ir.types import size_key
from tessera.ops.factors.rule import Factors, in_words, rule, tensors

Q, K, V = "b h q! e!", "b h k! e!", "b h k! v!"
OUT, LSE = "b h q! v!", "b h q!"


def _mask(mask: Value, q: Value) -> str:
    """A mask is broadcast against queries and keys."""
    names = ["b", "h", "q!", "k!"][4 - mask.ndim :]
    wide = [size_key(q.shape[0]), size_key(q.shape[1]), None, None][4 - mask.ndim :]
    sizes = zip(names, wide, mask.shape, strict=True)
    return " ".join(n if w is None or size_key(s) == w else "1" for n, w, s in sizes)


def _same_heads(eqn: Equation) -> bool:
    q, k, v = tensors(eqn)[:3]
    return q.ndim == 4 and size_key(q.shape[1]) == size_key(k.shape[1]) == size_key(v.shape[1])


@rule("scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu")
def attention(eqn: Equation) -> Factors | None:
    positional, keyword = eqn.bound()
    q, _, _, *mask = tensors(eqn)
    whole = eqn.opname == "scaled_dot_product_attention"
    if positional[4 if whole else 3] or not _same_heads(eqn):  # dropout
        return None
    left = ", ".join([Q, K, V, *(_mask(m, q) for m in mask)])
    return in_words(eqn, f"{left} -> {OUT}" if whole else f"{left} -> {OUT}, {LSE}")


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(eqn: Equation) -> Factors | None:
    positional, _ = eqn.bound()
    ct, q, k, v, out, lse, *mask = tensors(eqn)
    if positional[6] or q.ndim != 4 or size_key(q.shape[1]) != size_key(k.shape[1]):
        return None
    left = ", ".join([OUT, Q, K, V, OUT, LSE, *(_mask(m, q) for m in mask)])
    return in_words(eqn, f"{left} -> {Q}, {K}, {V}")
