"""Sharding rules of attention: batch and heads may be cut, and the sequence by exchanging.

Queries and keys of one sequence are one factor. It must be whole, but where an axis has split it there are two ways:
heads are cut instead, so that operands are re-laid by all-to-alls and results go back (Ulysses); or, along an axis that
the plan calls a ring, keys and values go round (`ring`). Of grouped heads the groups are cut.
"""

from __future__ import annotations

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.types import TensorType, size_key
from tessera.ops.factors.ring import ring_attention, ring_backward, same_size
from tessera.ops.factors.rule import Dims, Factors, arguments, decomposed, rule, tensors

FUSED = [f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")]
FLASH_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
KERNELS = f"scaled_dot_product_attention {FLASH_ON_CPU}"
BACKWARD = f"{FLASH_ON_CPU}_backward"


def _sizes(q: Value, k: Value, v: Value) -> dict | None:
    """The sizes of heads of keys and of the queries' heads that share one; None where they do not fit."""
    heads, pairs = q.shape[1], k.shape[1]
    if not isinstance(heads, int) or not isinstance(pairs, int) or size_key(v.shape[1]) != pairs or heads % pairs:
        return {"h": heads} if size_key(heads) == size_key(pairs) == size_key(v.shape[1]) else None
    return {"h": pairs, "g": heads // pairs}


class _Attention:
    """The dimensions of one call, by the names that operators give their arguments."""

    def __init__(self, eqn: Equation) -> None:
        self.given = {name: a for name, a in arguments(eqn).items() if isinstance(a, Value)}
        self.q, self.k, self.v = (self.given[name] for name in ("query", "key", "value"))
        self.sizes = _sizes(self.q, self.k, self.v) if self.q.ndim == self.k.ndim == 4 else None
        self.known = self.sizes is not None and not arguments(eqn)["dropout_p"]
        self.heads = ("h", "g") if self.sizes and self.sizes.get("g", 1) != 1 else ("h",)
        self.keys = "s" if size_key(self.q.shape[2]) == size_key(self.k.shape[2]) else "k"
        lse = self.given.get("logsumexp", eqn.outputs[1] if eqn.many else None)
        self.around = {"s"} if self.keys == "s" and (lse is None or same_size(lse, self.q)) else set()
        self.whole = {"s", "k", "e", "v", "m"}

    def dims(self, name: str, v: Value) -> Dims:
        match name.rstrip("_"):
            case "query":
                return ("b",), self.heads, ("s",), ("e",)
            case "key":
                return ("b",), ("h",), (self.keys,), ("e",)
            case "value":
                return ("b",), ("h",), (self.keys,), ("v",)
            case "grad_out" | "out" | "output":
                return ("b",), self.heads, ("s",), ("v",)
            case "logsumexp" | "log_sumexp":  # some kernels round its size up
                own = "s" if size_key(v.shape[2]) == size_key(self.q.shape[2]) else "rounded"
                self.whole.add(own)
                return (("b",), self.heads, (own,), ())[: v.ndim]
            case "attn_mask" | "attn_bias":
                return self.mask(v)
        names = tuple((f"{name}{i}",) for i in range(v.ndim))  # states of generators, which nobody reads
        self.whole.update(f for dim in names for f in dim)
        return names

    def mask(self, mask: Value) -> Dims:
        """It is broadcast against queries and keys. In a ring it stays with the queries, and has all keys."""
        dims: Dims = (("b",), self.heads, ("s",), ("m" if self.around else self.keys,))
        wide = [size_key(n) for n in (*self.q.shape[:3], self.k.shape[2])]
        pairs = zip(dims[4 - mask.ndim :], wide[4 - mask.ndim :], mask.shape, strict=True)
        return tuple(dim if size_key(n) == w else () for dim, w, n in pairs)

    def rule(self, results: list[Dims | None], local: object) -> Factors:
        operands = tuple(self.dims(name, v) for name, v in self.given.items() if isinstance(v.type, TensorType))
        return Factors(
            operands,
            tuple(results),
            whole=frozenset(self.whole),
            sizes=self.sizes or {},
            local=local,  # type: ignore[arg-type]
            instead=frozenset("h"),
            around=frozenset(self.around),
        )


@rule(f"{KERNELS} {' '.join(FUSED)}")
def attention(eqn: Equation) -> Factors | None:
    """Behind the result and its log-sum-exp stand sizes and states of generators, the same on all ranks."""
    call = _Attention(eqn)
    if not call.known:
        return None
    named = zip(("out", "logsumexp"), eqn.outputs, strict=False)
    results = [None if v is None else call.dims(name, v) for name, v in named]
    return call.rule([*results, *[None] * (len(eqn.outputs) - len(results))], ring_attention)


@rule(f"{BACKWARD} {' '.join(f'{name}_backward' for name in FUSED)}")
def attention_backward(eqn: Equation) -> Factors | None:
    call = _Attention(eqn)
    if not call.known or any(v is not None for v in eqn.outputs[3:]):  # the gradient of a mask
        return None
    named = zip(("query", "key", "value"), eqn.outputs, strict=False)
    results = [None if v is None else call.dims(name, v) for name, v in named]
    return call.rule([*results, *[None] * (len(eqn.outputs) - len(results))], ring_backward)


# --- fewer heads of keys than ranks ---------------------------------------------------------------


def _repeated(x: Value, times: int) -> Value:
    b, h, s, e = x.shape
    return aten.reshape(aten.expand(aten.unsqueeze(x, 2), [b, h, times, s, e]), [b, h * times, s, e])  # type: ignore[operator]


def _added(x: Value, times: int) -> Value:
    b, h, s, e = x.shape
    return aten.sum(aten.reshape(x, [b, h // times, times, s, e]), [2])  # type: ignore[operator]


@decomposed(KERNELS)
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


@decomposed(BACKWARD)
def one_head_each_backward(eqn: Equation) -> object:
    _, q, k, v, *_ = tensors(eqn)
    sizes = _sizes(q, k, v) if q.ndim == 4 else None
    if sizes is None or sizes.get("g", 1) == 1:
        return None
    own = {k: _repeated(k, sizes["g"]), v: _repeated(v, sizes["g"])}
    here = eqn.substitute(own)
    dq, dk, dv = getattr(aten, eqn.opname)(*here.args, **here.kwargs)
    return [dq, _added(dk, sizes["g"]), _added(dv, sizes["g"])]
