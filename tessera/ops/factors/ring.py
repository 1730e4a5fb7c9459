"""Attention over a sequence that lies on the ranks of an axis: keys and values go round, queries stay.

In: an attention equation over one rank's operands, and how it is cut. Out: its results as equations. At step t a rank
has the keys of the rank that stands t places before it; what its queries find there is merged by log-sum-exp. Backward
goes round the same way; gradients of keys and values travel behind them and come home after the last step.

Under a causal mask a rank whose keys come later has nothing to do, so the sequence is best cut in zigzag: a rank has a
chunk of the start and its mirror of the end. Then in each step every rank has two pairs of chunks to do: its late
queries with the others' early keys, and either its early queries with those too, or its late queries with the late
keys. Which of the two is a value, not a shape, so all ranks run one text. A mask stays with the queries
(`ring_mask`); a query that sees none of the keys of a step finds nothing there.

Here a log-sum-exp is [B, H, S]. Some kernels give it a last dimension of 1, or room for queries up to a multiple of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.schema import schema_of
from tessera.ir.types import size_key
from tessera.ops.factors.ring_mask import LOWEST, Mask, sees
from tessera.ops.factors.rule import Cut, arguments
from tessera.ops.families import cast

LENGTH = 2  # the dimension of the sequence
BIAS = "attn_bias"
ROOM = {"_scaled_dot_product_efficient_attention_backward": 32}  # queries for which a log-sum-exp has room, in steps
Halves = tuple[Value, Value]


@dataclass(frozen=True)
class Round:
    """The way round an axis."""

    cut: Cut
    axis: str
    zigzag: bool
    causal: bool

    @property
    def ranks(self) -> int:
        return self.cut.mesh.mesh.size(self.axis)

    def passed(self, x: Value) -> Value:
        """What the rank before this one has."""
        return emit(self.cut.mesh.permute, x, self.axis, 1)

    def rank(self, device: torch.device) -> Value:
        """A rank's place."""
        return emit(self.cut.mesh.start, self.ranks, (self.axis,), device)

    def earlier(self, step: int, device: torch.device) -> Value:
        """Whether the keys at a step stand before a rank's own; a truth value that depends on the rank."""
        return aten.ge(self.rank(device), step)

    def mask(self, eqn: Equation) -> Mask | None:
        mask = arguments(eqn).get(_mask_name(eqn))
        if not isinstance(mask, Value):
            return None
        return Mask.of(mask, self.rank(mask.tensor.device), self.ranks, self.zigzag)


def _round(eqn: Equation, cut: Cut) -> Round | None:
    axes = cut.axes.get("s", ())
    if not axes:
        return None
    (axis,) = axes
    place = cut.results[0]
    assert place is not None
    return Round(cut, axis, place.mark(axis).zigzag, bool(arguments(eqn)["is_causal"]))


def _mask_name(eqn: Equation) -> str:
    return BIAS if BIAS in arguments(eqn) else "attn_mask"


def _masked(eqn: Equation, mask: Value | None, q: Value, k: Value) -> dict[str, Arg]:
    """A kernel's argument for a mask; those of GPUs want one that has all sizes."""
    if mask is None:
        return {}
    name = _mask_name(eqn)
    return {name: aten.expand(mask, [*q.shape[:3], k.shape[LENGTH]]) if name == BIAS else mask}


def _with(eqn: Equation, **given: Arg) -> object:
    """The equation's operator on other arguments, by name."""
    named: dict[str, Any] = arguments(eqn) | given
    if "max_q" in named:  # the longest sequences
        named |= {"max_q": named["query"].shape[LENGTH], "max_k": named["key"].shape[LENGTH]}
    params = schema_of(eqn.op).params  # type: ignore[arg-type]
    positional = [named[p.name] for p in params if not p.keyword]
    return emit(eqn.op, *positional, **{p.name: named[p.name] for p in params if p.keyword})


def same_size(lse: Value, q: Value) -> bool:
    return size_key(lse.shape[LENGTH]) == size_key(q.shape[LENGTH])


def halves(x: Value) -> Halves:
    length = int(x.shape[LENGTH])
    return aten.slice(x, LENGTH, 0, length // 2), aten.slice(x, LENGTH, length // 2, length)


def _wide(x: Value) -> Value:
    return cast(x, torch.promote_types(x.dtype, torch.float32))


# --- forward --------------------------------------------------------------------------------------

Found = tuple[Value, Value]  # what queries found in some keys, and the log-sum-exp of their scores


def merged(a: Found, b: Found) -> Found:
    """What queries found in two sets of keys, as in both together."""
    return _weighed(a, b, aten.logaddexp(a[1], b[1]))


def merged_in_part(a: Found, b: Found) -> Found:
    """As `merged`, where a query may have found nothing in either."""
    total = aten.logaddexp(a[1], b[1])
    mean, _ = _weighed(a, b, _or_zero(total))
    return mean, total


def _or_zero(lse: Value) -> Value:
    """The log-sum-exp, or 0 where nothing was found."""
    return aten.where(aten.eq(lse, LOWEST), aten.zeros_like(lse), lse)


def _weighed(a: Found, b: Found, total: Value) -> Found:
    weights = [aten.unsqueeze(aten.exp(aten.sub(lse, total)), -1) for lse in (a[1], b[1])]
    return aten.add(aten.mul(a[0], weights[0]), aten.mul(b[0], weights[1])), total


def _only(mean: Found, where: Value) -> Found:
    """Nothing was found where this is false."""
    return mean[0], aten.where(where, mean[1], aten.full_like(mean[1], LOWEST))


def ring_attention(eqn: Equation, cut: Cut) -> object:
    way = _round(eqn, cut)
    if way is None:
        return emit(eqn.op, *eqn.args, **eqn.kwargs)
    named = arguments(eqn)
    q, k, v = named["query"], named["key"], named["value"]
    rest: list = []  # what a kernel gives beside
    find, mask = _finder(eqn, rest), way.mask(eqn)
    total = find(q, k, v, way.causal) if mask is None else _seen(find, q, k, v, mask.at(0))
    for step in range(1, way.ranks):
        k, v = way.passed(k), way.passed(v)
        if mask is not None:
            total = merged_in_part(total, _seen(find, q, k, v, mask.at(step)))
        elif way.causal and way.zigzag:
            total = _zigzag_step(total, q, k, v, find, way.earlier(step, q.tensor.device))
        else:
            more = find(q, k, v, False)
            total = merged(total, _only(more, way.earlier(step, q.tensor.device)) if way.causal else more)
    out, lse = cast(total[0], q.dtype), total[1] if mask is None else _or_zero(total[1])
    return [out, _as(eqn.outputs[1], lse), *rest] if eqn.many else out


def _as(wanted: Value | None, lse: Value) -> Value:
    return aten.unsqueeze(lse, -1) if wanted is not None and wanted.ndim > lse.ndim else lse


def _seen(find: Callable[..., Found], q: Value, k: Value, v: Value, mask: Value) -> Found:
    """What queries find through a mask. What kernels give where a query sees nothing is theirs: zeros, or NaN."""
    (out, lse), seen = find(q, k, v, False, mask), sees(mask)
    found = aten.where(aten.unsqueeze(seen, -1), out, aten.zeros_like(out))
    return found, aten.where(seen, lse, aten.full_like(lse, LOWEST))


def _finder(eqn: Equation, rest: list) -> Callable[..., Found]:
    def kernel(q: Value, k: Value, v: Value, causal: bool, mask: Value | None = None) -> Found:
        given = _masked(eqn, mask, q, k) | ({"compute_log_sumexp": True} if _mask_name(eqn) == BIAS else {})
        out, lse, *rest[:] = _with(eqn, query=q, key=k, value=v, is_causal=causal, **given)  # type: ignore[misc]
        lse = aten.squeeze(lse, -1) if lse.ndim > 3 else lse
        return _wide(out), lse if same_size(lse, q) else aten.slice(lse, LENGTH, 0, q.shape[LENGTH])

    def arithmetic(q: Value, k: Value, v: Value, causal: bool, mask: Value | None = None) -> Found:
        """The operator as a whole keeps its log-sum-exp to itself."""
        scale = arguments(eqn)["scale"] or int(q.shape[-1]) ** -0.5
        q, k, v = (_wide(x) for x in (q, _own_heads(k, q), _own_heads(v, q)))
        scores = aten.mul(aten.matmul(q, aten.transpose(k, -2, -1)), scale)
        if causal:
            sizes = [q.shape[LENGTH], k.shape[LENGTH]]
            hidden = aten.triu(aten.ones(sizes, dtype=torch.bool, device=q.tensor.device), 1)
            scores = aten.masked_fill(scores, hidden, LOWEST)
        if mask is None:
            return aten.matmul(aten.softmax(scores, -1), v), aten.logsumexp(scores, [-1])
        truths = not mask.dtype.is_floating_point
        scores = aten.masked_fill(scores, aten.logical_not(mask), LOWEST) if truths else aten.add(scores, mask)
        return aten.matmul(aten._safe_softmax(scores, -1), v), aten.logsumexp(scores, [-1])

    return kernel if eqn.many else arithmetic


def _own_heads(x: Value, q: Value) -> Value:
    b, h, s, e = x.shape
    times = int(q.shape[1]) // int(h)
    if times == 1:
        return x
    return aten.reshape(aten.expand(aten.unsqueeze(x, 2), [b, h, times, s, e]), [b, q.shape[1], s, e])


def _zigzag_step(
    total: Found, q: Value, k: Value, v: Value, find: Callable[..., Found], earlier: Value
) -> Found:  # fmt: skip
    (q0, q1), (k0, k1), (v0, v1) = halves(q), halves(k), halves(v)
    late = find(q1, k0, v0, False)
    other = find(*(aten.where(earlier, a, b) for a, b in ((q0, q1), (k0, k1), (v0, v1))), False)
    (out0, out1), (lse0, lse1) = halves(total[0]), halves(total[1])
    first = merged((out0, lse0), _only(other, earlier))
    second = merged(merged((out1, lse1), late), _only(other, aten.logical_not(earlier)))
    return aten.cat([first[0], second[0]], LENGTH), aten.cat([first[1], second[1]], LENGTH)


# --- backward -------------------------------------------------------------------------------------


def ring_backward(eqn: Equation, cut: Cut) -> object:
    way = _round(eqn, cut)
    if way is None:
        return emit(eqn.op, *eqn.args, **eqn.kwargs)
    named = arguments(eqn)
    pulled = "grad_out_" if "grad_out_" in named else "grad_out"
    ct, q, k, v, out, lse = (named[n] for n in (pulled, "query", "key", "value", "out", "logsumexp"))
    queries, mask = (ct, q, out, lse), way.mask(eqn)

    def pull(rows: tuple, k: Value, v: Value, causal: bool, step: int = 0) -> list[Value]:
        ct, q, out, lse = rows
        given = _masked(eqn, None if mask is None else mask.at(step), q, k) | {pulled: ct}
        roomy = _with_room(lse, ROOM.get(eqn.opname, 1))
        grads = _with(eqn, query=q, key=k, value=v, out=out, logsumexp=roomy, is_causal=causal, **given)
        return grads[:3]  # type: ignore[index]

    dq, own_k, own_v = pull(queries, k, v, way.causal)
    dq = _wide(dq)
    travelling: list[Value] = []
    for step in range(1, way.ranks):
        k, v = way.passed(k), way.passed(v)
        earlier = way.earlier(step, q.tensor.device) if way.causal else None
        if earlier is not None and way.zigzag:
            more, dk, dv = _zigzag_pull(queries, k, v, pull, earlier)
        else:
            more, dk, dv = pull(queries, k, v, False, step)
            if earlier is not None:
                more, dk, dv = (aten.where(earlier, x, aten.zeros_like(x)) for x in (more, dk, dv))
        dq = aten.add(dq, _wide(more))
        travelling = [way.passed(x) for x in (_sums(travelling, [dk, dv]) if travelling else [dk, dv])]
    dk, dv = _sums([own_k, own_v], travelling) if travelling else (own_k, own_v)
    return [cast(dq, q.dtype), dk, dv, *[None] * (len(eqn.outputs) - 3)]


def _with_room(lse: Value, step: int) -> Value:
    """A log-sum-exp with as many rows as a kernel reads; those of no query are infinite."""
    missing = -int(lse.shape[LENGTH]) % step
    return aten.constant_pad_nd(lse, [0, missing], float("inf")) if missing else lse


def _sums(a: list[Value], b: list[Value]) -> list[Value]:
    return [aten.add(x, y) for x, y in zip(a, b, strict=True)]


def _zigzag_pull(queries: tuple, k: Value, v: Value, pull: Callable, earlier: Value) -> tuple[Value, Value, Value]:
    """Gradients of the two pairs of chunks that a rank has to do, each where it belongs."""
    rows = [halves(x) for x in queries]
    (k0, k1), (v0, v1) = halves(k), halves(v)
    dq1, dk0, dv0 = pull(tuple(late for _, late in rows), k0, v0, False)
    chosen = tuple(aten.where(earlier, a, b) for a, b in rows)
    dq, dk, dv = pull(chosen, aten.where(earlier, k0, k1), aten.where(earlier, v0, v1), False)

    def placed(x: Value, early: Value | None, late: Value | None) -> Value:
        """What belongs to early chunks or to late ones, beside what is there already."""
        none = aten.zeros_like(x)
        parts = aten.where(earlier, x, none), aten.where(earlier, none, x)
        listed = [
            part if there is None else aten.add(part, there) for part, there in zip(parts, (early, late), strict=True)
        ]
        return aten.cat(listed, LENGTH)

    return placed(dq, None, dq1), placed(dk, dk0, None), placed(dv, dv0, None)
