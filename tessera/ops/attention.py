"""Scaled dot-product attention, kept whole.

Its first derivative is PyTorch's own formula for the call, so that training makes eager's choice of kernel
(flash, memory-efficient, cuDNN or plain arithmetic) on every device. Those kernels' backward operators have
no derivative in PyTorch: here they get one from the arithmetic they stand for, so that attention can be
differentiated any number of times, in either mode. Batches are folded into the first dimension, which every
kernel loops over anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Arg, Equation, Special, Value
from tessera.ir.schema import schema_of
from tessera.ir.types import Size, TensorType, size_hint
from tessera.ops.fallback import dense
from tessera.ops.families import carry, is_one, pad_rank, product
from tessera.ops.formula import finish, pytorch_batch, pytorch_jvp, pytorch_vjp
from tessera.ops.op import declare
from tessera.torch_internals.operators import OpOverload, op_schema
from tessera.util.errors import RuleError

# --- the arithmetic -----------------------------------------------------------------------------------


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None
) -> tuple[torch.Tensor, float]:
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(q, k.transpose(-2, -1)) * factor
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(allowed.logical_not(), float("-inf"))
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(mask.logical_not(), float("-inf"))
        else:
            scores = scores + mask
    return torch.ops.aten._safe_softmax(scores, -1), factor


def _heads(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Grouped queries: each head of keys and values serves several heads of queries."""
    if x.ndim < 3 or x.shape[-3] == like.shape[-3]:
        return x
    return x.repeat_interleave(like.shape[-3] // x.shape[-3], -3)


def _math(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None
) -> torch.Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    p, _ = _scores(q.to(wide), _heads(k, q).to(wide), mask, causal, scale)
    return torch.matmul(p, _heads(v, q).to(wide)).to(q.dtype)


def _math_backward(
    ct: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    with_mask: bool,
) -> list[torch.Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    ct_, q_, k_, v_ = ct.to(wide), q.to(wide), _heads(k, q).to(wide), _heads(v, q).to(wide)
    p, factor = _scores(q_, k_, mask, causal, scale)
    gv = torch.matmul(p.transpose(-2, -1), ct_)
    gp = torch.matmul(ct_, v_.transpose(-2, -1))
    gs = p * (gp - (gp * p).sum(-1, keepdim=True))
    gq = torch.matmul(gs, k_) * factor
    gk = torch.matmul(gs.transpose(-2, -1), q_) * factor
    if gk.shape[-3] != k.shape[-3]:
        gk, gv = (g.unflatten(-3, (k.shape[-3], q.shape[-3] // k.shape[-3])).sum(-3) for g in (gk, gv))
    grads = [gq.to(q.dtype), gk.to(k.dtype), gv.to(v.dtype)]
    if with_mask:
        assert mask is not None
        grads.append(gs.sum_to_size(mask.shape).to(mask.dtype))
    return grads


MATH = Special("attention_math", _math)
MATH_BACKWARD = Special("attention_math_backward", _math_backward)


# --- arguments by name: the variants differ in order only -----------------------------------------------


_ALIASES = {"grad_out_": "grad_out", "attn_bias": "attn_mask"}


def _named(op: OpOverload, args: Sequence[Arg], kw: dict[str, Arg]) -> dict[str, Arg]:
    params = schema_of(op).positional
    listed = [(p.name, a) for p, a in zip(params, args, strict=False)] + list(kw.items())
    return {_ALIASES.get(name, name): a for name, a in listed}


def _no_dropout(op: OpOverload, p: object) -> None:
    if p:
        raise RuleError(
            f"{op} with dropout_p={p} has no second derivative and no tangent: it keeps its mask to itself. "
            "Use dropout_p=0, or apply dropout outside of attention."
        )


def _without_dropout(eqn: Equation) -> bool:
    return len(eqn.args) < 5 or eqn.args[4] == 0


def _mathematical(op: OpOverload, given: dict[str, Arg]) -> tuple[Arg, ...]:
    _no_dropout(op, given.get("dropout_p"))
    return tuple(given.get(n) for n in ("query", "key", "value", "attn_mask", "is_causal", "scale"))


# --- rules ----------------------------------------------------------------------------------------------


def jvp_attention(op: OpOverload) -> Callable:
    """Tangents by the arithmetic; a logsumexp and the like have none, for only backward reads them."""

    def jvp(ts: Sequence[Value | None], y: object, *args: Arg, **kw: Arg) -> object:
        given = _named(op, args, kw)
        moving = {id(a): t for a, t in zip(args, ts, strict=False) if t is not None}
        values = _mathematical(op, given)
        tangents = [moving.get(id(a)) if isinstance(a, Value) else None for a in values]
        (out,) = pytorch_jvp(MATH, tangents, *values)
        return [out, *[None] * (len(y) - 1)] if isinstance(y, list) else out

    return jvp


def jvp_backward(op: OpOverload) -> Callable:
    def jvp(ts: Sequence[Value | None], y: list[Value | None], *args: Arg, **kw: Arg) -> list[Value | None]:
        given = _named(op, args, kw)
        moving = {id(a): t for a, t in zip(args, ts, strict=False) if t is not None}
        values = (given["grad_out"], *_mathematical(op, given), _gives_mask(y))
        tangents = [moving.get(id(a)) if isinstance(a, Value) else None for a in values]
        out = iter(pytorch_jvp(MATH_BACKWARD, tangents, *values))
        return [None if v is None else next(out) for v in y]

    return jvp


def _gives_mask(y: Sequence[Value | None]) -> bool:
    return len(y) == 4 and y[3] is not None


def forward_kernel(op: OpOverload, back: OpOverload) -> Callable:
    """A fused kernel and its backward: what backward wants, found by name among arguments and results."""
    renamed = {"output": "out", "log_sumexp": "logsumexp", "rng_state": "philox_seed", "unused": "philox_offset"}

    def forward(need: Sequence[object], *args: Arg, **kw: Arg) -> Generator[object, object, tuple]:
        outs = emit(op, *args, **kw)
        cts = yield outs
        ct = cts[0] if isinstance(cts, list) else cts
        if ct is None:
            return ()
        given = _named(op, args, kw) | {"grad_out": ct}
        given |= {renamed.get(r.name, r.name): y for r, y in zip(op_schema(op).returns, outs, strict=True)}
        asked = {p.name: n is True for p, n in zip(schema_of(op).positional, need, strict=True)}
        given["grad_input_mask"] = [asked.get(n, False) for n in ("query", "key", "value", "attn_bias")]
        params = schema_of(back).params
        values = {p.name: given[_ALIASES.get(p.name, p.name)] for p in params}
        grads = emit(
            back,
            *(values[p.name] for p in params if not p.keyword),
            **{p.name: values[p.name] for p in params if p.keyword},
        )
        return tuple(grads)

    return forward


def forward_backward(op: OpOverload) -> Callable:
    """The vjp of a backward kernel: that of the arithmetic, emitted only if it is asked for."""

    def forward(need: Sequence[object], *args: Arg, **kw: Arg) -> Generator[object, object, tuple]:
        given = _named(op, args, kw)
        out = emit(op, *args, **kw)
        cts = yield out
        values = (given["grad_out"], *_mathematical(op, given), _gives_mask(out))
        needed = {id(a) for a, n in zip(args, need, strict=False) if n is True}
        rule = pytorch_vjp([id(a) in needed for a in values], MATH_BACKWARD, *values)
        next(rule)
        pulled = finish(rule, cts)
        grads = {id(a): g for a, g in zip(values, pulled, strict=True) if isinstance(a, Value)}
        return tuple(grads.get(id(a)) for a in args)

    return forward


def batch_attention(op: OpOverload) -> Callable:
    def batch(size: Size, on: Sequence[object], q: Value, k: Value, v: Value, *rest: Arg, **kw: Arg) -> Value:
        ranks = {x.ndim - bool(b) for x, b in zip((q, k, v), on, strict=False)}
        if ranks != {4}:
            return pytorch_batch(op, on, q, k, v, *rest, **kw)  # type: ignore[return-value]
        if isinstance(rest[0], Value):
            rest = (_fold_mask(rest[0], bool(on[3]), size, q.shape[bool(on[0])]), *rest[1:])
        q, k, v = (_fold(x, bool(b), size) for x, b in zip((q, k, v), on, strict=False))
        return _unfold(aten.scaled_dot_product_attention(q, k, v, *rest, **kw), size)

    return batch


def batch_kernel(op: OpOverload) -> Callable:
    """One kernel over N·B sequences in place of B kernels over N. Random state is shared."""

    def batch(size: Size, on: Sequence[object], *args: Arg, **kw: Arg) -> list[Value | None]:
        names = [p.name for p in schema_of(op).positional]
        q, carries_q = next((a, b) for n, a, b in zip(names, args, on, strict=False) if n == "query")
        assert isinstance(q, Value)
        sequences = q.shape[bool(carries_q)]

        def folded(name: str, a: Arg, carries: bool) -> Arg:
            if not isinstance(a, Value) or name in _SHARED:
                return a
            if name in ("attn_mask", "attn_bias"):
                return _fold_mask(a, carries, size, sequences)
            return _fold(a, carries, size)

        lifted = [folded(n, a, bool(b)) for n, a, b in zip(names, args, on, strict=False)]
        named = {n: folded(n, a, False) for n, a in kw.items()}
        out = emit(op, *lifted, **named)
        kinds = [r.name for r in op_schema(op).returns]
        return [_unfold(y, size) if _is_data(y, n) else y for y, n in zip(out, kinds, strict=True)]

    return batch


_SHARED = ("philox_seed", "philox_offset", "cum_seq_q", "cum_seq_k", "rng_state", "unused", "debug_attn_mask")


def _is_data(y: object, name: str) -> bool:
    return isinstance(y, Value) and isinstance(y.type, TensorType) and name not in _SHARED and y.ndim >= 3


def _fold_mask(mask: Value, on: bool, size: Size, sequences: Size) -> Value:
    """A mask over (N, heads, queries, keys) for the folded sequences; one that broadcasts over N stays."""
    if not on and (mask.ndim < 4 or is_one(mask.shape[0])):
        return mask
    mask = pad_rank(mask, 5) if on else mask
    lead = [size, sequences]
    mask = aten.expand(mask if on else aten.unsqueeze(mask, 0), [*lead, *mask.shape[-3:]])
    return aten.reshape(mask, [product(lead), *mask.shape[2:]])


def _fold(x: Value, on: bool, size: Size) -> Value:
    x = carry(x, on, size)
    return aten.reshape(x, [product(x.shape[:2]), *x.shape[2:]])


def _unfold(y: Value, size: Size) -> Value:
    return aten.reshape(y, [size, y.shape[0] // size, *y.shape[1:]])


# --- layout ---------------------------------------------------------------------------------------------


def by_token(t: TensorType) -> TensorType:
    """The cotangent of attention on a GPU as [B, T, H, D] in memory: the projection that follows attention gives it so,
    and the library's kernels, which all read that layout, need no copy. There are none for double precision."""
    if t.device.type == "cpu" or len(t.shape) != 4 or t.dtype is torch.float64:
        return dense(t)
    _, heads, tokens, width = t.shape
    return TensorType(t.dtype, t.shape, (tokens * heads * width, width, heads * width, 1), t.device)


# --- cost -----------------------------------------------------------------------------------------------


def cost_attention(factor: float) -> Callable[[Equation], float]:
    """Two products of queries by keys and by values; backward has five. A causal mask halves both."""

    def cost(eqn: Equation) -> float:
        given = _named(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
        q, k, v = given["query"], given["key"], given["value"]
        assert isinstance(q, Value) and isinstance(k, Value) and isinstance(v, Value)
        pairs = q.tensor.numel() // max(size_hint(q.shape[-1]), 1) * size_hint(k.shape[-2])
        flops = factor * pairs * (size_hint(q.shape[-1]) + size_hint(v.shape[-1]))
        return flops / 2 if given.get("is_causal") else flops

    return cost


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")


def _declare() -> None:
    whole = torch.ops.aten.scaled_dot_product_attention.default
    declare(
        "aten.scaled_dot_product_attention.default",
        "attention",
        applies=_without_dropout,
        jvp=jvp_attention(whole),
        batch=batch_attention(whole),
        cotangent=by_token,
        cost=cost_attention(2),
    )
    for kernel in _KERNELS:
        name = f"_scaled_dot_product_{kernel}"
        ahead, behind = (getattr(torch.ops.aten, n).default for n in (name, f"{name}_backward"))
        declare(
            f"aten.{name}.default",
            "attention",
            forward=forward_kernel(ahead, behind),
            passive=tuple(range(1, len(op_schema(ahead).returns))),
            jvp=jvp_attention(ahead),
            batch=batch_kernel(ahead),
            cost=cost_attention(2),
        )
        declare(
            f"aten.{name}_backward.default",
            "attention",
            forward=forward_backward(behind),
            jvp=jvp_backward(behind),
            batch=batch_kernel(behind),
            cost=cost_attention(5),
        )


_declare()
