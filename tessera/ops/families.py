"""Families: what operators of one kind have in common, so that most are declared in one line.

    unary("aten.sin", d=lambda x, y: aten.cos(x))
    binary("aten.mul", d=(lambda a, b, y: b, lambda a, b, y: a))

A pointwise derivative is a diagonal map, so the same formula pulls cotangents back and pushes tangents
forward: `d` is a factor, `by` the map itself where a factor would not do (a mask keeps an infinite cotangent
out, PyTorch has a fused kernel). The family adds broadcasting, dtypes and batching. Nothing here compares
symbolic sizes by value, so no rule ever adds a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import ACTIVE, Arg, Equation, Value
from tessera.ir.types import Size, TensorType, size_key
from tessera.ops.op import Rules, declare
from tessera.util.cost import flops_per_element

Map = Callable[..., Value]
Factor = Callable[..., Arg]  # a Value or a number

# --- words that rules are made of -----------------------------------------------------------------


def call(name: str) -> Callable:
    """The operator of that name over Values; for a packet, the arguments choose the overload."""
    namespace, packet_name, *overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), packet_name)
    if overload:
        op = getattr(packet, overload[0])
        return lambda *args, **kwargs: emit(op, *args, **kwargs)
    return lambda *args, **kwargs: ACTIVE[-1].call_packet(packet, args, kwargs)  # type: ignore[attr-defined]


def differentiated_again() -> bool:
    """What rules emit now may itself be differentiated."""
    return ACTIVE[-1].again  # type: ignore[attr-defined]


def is_one(size: Size) -> bool:
    return str(size_key(size)) == "1"


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return [str(size_key(s)) for s in a] == [str(size_key(s)) for s in b]


def is_number(x: Arg, value: float) -> bool:
    """A Python number, known now, that equals `value`."""
    return type(x) in (int, float) and x == value


def sum_to(t: Value, like: Value) -> Value:
    """Undo broadcasting: sum over the dimensions that `like` does not have, or has with size one."""
    lead = t.ndim - like.ndim
    stretched = [lead + i for i, s in enumerate(like.shape) if is_one(s) and not is_one(t.shape[lead + i])]
    dims = [*range(lead), *stretched]
    if not dims:
        return t
    out = aten.sum(t, dims, bool(stretched))
    return aten.squeeze(out, list(range(lead))) if lead and stretched else out


def expand_to(t: Value, shape: Sequence[Size]) -> Value:
    return t if same_shape(t.shape, shape) else aten.expand(t, list(shape))


def cast(t: Value, dtype: torch.dtype) -> Value:
    return t if t.dtype == dtype else aten._to_copy(t, dtype=dtype)


def fit(t: Value, y: Value) -> Value:
    """A tangent as its result wants it: that dtype, that shape."""
    return expand_to(cast(t, y.dtype), y.shape)


def times(t: Value, d: Arg) -> Value:
    if is_number(d, 1):
        return t
    return -t if is_number(d, -1) else t * d


def select(mask: Value, t: Value) -> Value:
    """`t` where the mask holds, else zero, whatever `t` is there."""
    return aten.where(mask, t, 0)


def zeros_for(x: Value, t: Value) -> Value:
    """Zeros in the shape of `x` and the dtype of the cotangent or tangent `t`."""
    return aten.new_zeros(t, list(x.shape))


def total(ts: Sequence[Value | None]) -> Value:
    """The sum of the tangents that are there."""
    there = [t for t in ts if t is not None]
    out = there[0]
    for t in there[1:]:
        out = out + t
    return out


def or_zeros(t: Value | None, x: Value) -> Value:
    return aten.zeros_like(x) if t is None else t


def product(sizes: Sequence[Size]) -> Size:
    out: Size = 1
    for s in sizes:
        out = out * s
    return out


def per_dimension(sizes: Arg, n: int) -> list:
    """One size for each of `n` dimensions, of a list or of one size for all."""
    listed = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]
    return listed * n if len(listed) == 1 else listed


def per_element(cost: float) -> Callable[[Equation], float] | None:
    """Flops of an operator that does `cost` of them for each element of its result."""
    if cost == 1:
        return None
    return lambda eqn: cost * sum(v.type.numel() for v in eqn.results() if isinstance(v.type, TensorType))


def per_input(cost: float = 1) -> Callable[[Equation], float]:
    """Flops of an operator that does `cost` of them for each element it reads."""
    return lambda eqn: cost * sum(v.type.numel() for v in eqn.inputs() if isinstance(v.type, TensorType))


# --- batching: the batch stands at dimension 0 of every argument that carries it -------------------


def wrap(dim: int, rank: int) -> int:
    """A dimension counted from the front; a 0-d tensor has one dimension to name."""
    return dim % max(rank, 1)


def shifted(dim: int, x: Value) -> int:
    """Where a logical dimension of a batched `x` stands."""
    return wrap(dim, x.ndim - 1) + 1


def carry(x: Value, on: bool, size: Size) -> Value:
    """`x` with the batch at dimension 0, repeated where it has none."""
    return x if on else aten.expand(aten.unsqueeze(x, 0), [size, *x.shape])


def pad_rank(x: Value, rank: int, at: int = 1) -> Value:
    """Dimensions of size one put in until `x` has `rank` of them."""
    for _ in range(rank - x.ndim):
        x = aten.unsqueeze(x, at)
    return x


def align(on: Sequence[object], args: Sequence[Arg]) -> list[Arg]:
    """Arguments of a broadcasting operator, batched ones padded so that only batches meet batches."""
    pairs = list(zip(on, args, strict=True))
    rank = max(a.ndim - bool(b) for b, a in pairs if isinstance(a, Value))
    args = [pad_rank(a, rank + 1) if b and isinstance(a, Value) else a for b, a in pairs]
    # A 0-d tensor weighs less in type promotion; with a batch dimension it would weigh more.
    logical = promoted([(a.dtype, a.ndim - bool(b)) for b, a in pairs if isinstance(a, Value)])
    physical = promoted([(a.dtype, a.ndim) for a in args if isinstance(a, Value)])
    if logical != physical:
        args = [cast(a, logical) if isinstance(a, Value) and a.dtype != torch.bool else a for a in args]
    return args


def promoted(operands: list[tuple[torch.dtype, int]]) -> torch.dtype:
    """PyTorch's common dtype of tensors, each given as (dtype, rank); a 0-d one only brings its kind."""
    wide = [d for d, rank in operands if rank]
    flat = [d for d, rank in operands if not rank]
    if not wide or not flat:
        return reduce(torch.promote_types, wide or flat)
    strong, weak = reduce(torch.promote_types, wide), reduce(torch.promote_types, flat)
    if strong.is_complex:
        return strong
    if strong.is_floating_point:
        return strong.to_complex() if weak.is_complex else strong
    outranked = strong == torch.bool or weak.is_floating_point or weak.is_complex
    return torch.promote_types(strong, weak) if outranked else strong


# --- pointwise ------------------------------------------------------------------------------------


def pointwise(
    name: str, by: Sequence[Map | None] = (), family: str = "pointwise", cost: float | None = None, **rules: object
) -> Rules:
    """An operator that works element by element, with broadcasting.

    `by[i](t, y, *args, **kw)` sends a change of argument i through the derivative at this point.
    """

    def pull(push: Map, a: Value, ct: Value, y: Value, args: tuple, kw: dict) -> Value:
        return sum_to(push(ct, y, *args, **kw), a)

    def vjp(ct: Value, y: Value, *args: Arg, **kw: Arg) -> tuple:
        return tuple(
            partial(pull, push, a, ct, y, args, kw) if push is not None and isinstance(a, Value) else None
            for push, a in zip(by, args, strict=False)
        )

    def jvp(ts: Sequence[Value | None], y: Value, *args: Arg, **kw: Arg) -> Value:
        moved = [push(t, y, *args, **kw) for push, t in zip(by, ts, strict=False) if t is not None and push is not None]
        return fit(total(moved), y)

    def batch(size: Size, on: Sequence[bool], *args: Arg, **kw: Arg) -> Value:
        if name.endswith("_backward"):  # kernels for equal shapes: not all of them broadcast (gelu's in oneDNN)
            args = tuple(carry(a, bool(b), size) if isinstance(a, Value) else a for a, b in zip(args, on, strict=True))
            on = [isinstance(a, Value) for a in args]
        return again(*align(on, args), **kw)

    again = call(name)
    cost = flops_per_element(name.split(".")[1]) if cost is None else cost
    own = {"vjp": vjp, "jvp": jvp} if by else {}
    return declare(name, family, **{**own, "batch": batch, "cost": per_element(cost), **rules})


def unary(
    name: str, d: Factor | None = None, by: Map | None = None, cost: float | None = None, **rules: object
) -> Rules:
    """`d(x, y, *params)` is the derivative, or `by(t, x, y, *params)` applies it."""
    if d is not None:
        factor = d
        maps = [lambda t, y, x, *p, **kw: times(t, factor(x, y, *p, **kw))]
    elif by is not None:
        push = by
        maps = [lambda t, y, x, *p, **kw: push(t, x, y, *p, **kw)]
    else:
        maps = []
    return pointwise(name, maps, "unary", cost, **rules)


def binary(
    name: str, d: Sequence[Factor] = (), by: Sequence[Map] = (), cost: float | None = None, **rules: object
) -> Rules:
    """`d[i](a, b, y, *params)` is the derivative by operand i, or `by[i](t, a, b, y, *params)` applies it."""

    def scaled(factor: Factor) -> Map:
        return lambda t, y, a, b, *p, **kw: times(t, factor(a, b, y, *p, **kw))

    def mapped(push: Map) -> Map:
        return lambda t, y, a, b, *p, **kw: push(t, a, b, y, *p, **kw)

    maps = [scaled(f) for f in d] or [mapped(f) for f in by]
    return pointwise(name, maps, "binary", cost, **rules)


def step(name: str) -> Rules:
    """Constant almost everywhere. Like PyTorch it passes zeros back: its result still asks for gradients."""
    return pointwise(name, [lambda t, y, *args, **kw: aten.zeros_like(t)], "step")


def predicate(name: str) -> Rules:
    """Pointwise with a result that has no derivative: comparisons, logic, integer arithmetic."""
    return pointwise(name, (), "predicate", zero=True)


# --- reductions -----------------------------------------------------------------------------------


def dims_of(dims: Arg, rank: int) -> list[int]:
    """The dimensions a reduction takes away; None and [] mean all of them."""
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, (list, tuple)) or not dims:
        return list(range(rank))
    return sorted(wrap(d, rank) for d in dims) if rank else []


def restore(t: Value, x: Value, dims: Arg, keepdim: Arg) -> Value:
    """Put reduced dimensions back with size one, so that `t` broadcasts against `x`."""
    if not keepdim:
        for d in dims_of(dims, x.ndim):
            t = aten.unsqueeze(t, d)
    return t


def reduced_batch(x: Value, dims: Arg) -> tuple[Value, list[int], bool]:
    """A batched operand and the dimensions to reduce; the flag tells that its rows are 0-d."""
    if x.ndim == 1:
        return aten.unsqueeze(x, 1), [1], True
    return x, [d + 1 for d in dims_of(dims, x.ndim - 1)], False


def reduction(
    name: str, family: str = "reduction", keep: int | str = 2, single: bool = False, **rules: object
) -> Rules:
    """An operator (x, dims, …) that takes dimensions away. `keep` is where its keepdim stands: a position, a
    name, or "" where it has none; `single` says that it names one dimension, not a list."""

    def batch(size: Size, on: Sequence[bool], x: Value, dims: Arg = None, *rest: Arg, **kw: Arg) -> object:
        lifted, where, flat = reduced_batch(x, dims)
        args = list(rest)
        if flat and isinstance(keep, int):
            args[keep - 2] = False
        elif flat and isinstance(keep, str) and keep:
            kw = {**kw, keep: False}
        return again(lifted, where[0] if single else where, *args, **kw)

    again = call(name)
    return declare(name, family, **{"batch": batch, "cost": per_input(), **rules})


def along(name: str, family: str, at: int = 1, **rules: object) -> Rules:
    """An operator whose argument `at` names one dimension it works along, keeping the others."""

    def batch(size: Size, on: Sequence[bool], *args: Arg, **kw: Arg) -> object:
        x = args[0]
        assert isinstance(x, Value)
        flat = x.ndim == 1
        lifted = aten.unsqueeze(x, 1) if flat else x
        out = again(lifted, *args[1:at], shifted(args[at], lifted), *args[at + 1 :], **kw)  # type: ignore[arg-type]
        if not flat:
            return out
        return [aten.squeeze(v, 1) for v in out] if isinstance(out, list) else aten.squeeze(out, 1)

    again = call(name)
    return declare(name, family, **{"batch": batch, "cost": per_input(), **rules})


# --- linear movement of data ----------------------------------------------------------------------


def linear(name: str, vjp: Callable, batch: Callable | None = None, family: str = "shape", **rules: object) -> Rules:
    """An operator linear in its first argument: `vjp(ct, x, *params)` is its transpose."""

    def pull(ct: object, y: object, x: Value, *params: Arg, **kw: Arg) -> tuple:
        return (lambda: vjp(ct, x, *params, **kw),)

    def jvp(ts: Sequence[Value | None], y: object, x: Value, *params: Arg, **kw: Arg) -> object:
        return again(ts[0], *params, **kw)

    again = call(name)
    own = {"vjp": pull, "jvp": jvp, "batch": batch, "real": False}
    return declare(name, family, **{**own, **rules})


def view(name: str, vjp: Callable, batch: Callable | None = None, **rules: object) -> Rules:
    """A linear operator whose result shares memory with its argument: it moves no data."""
    return linear(name, vjp, batch, "view", **{"free": True, **rules})
