"""Copies, casts, fills and constructors shaped like another tensor.

A copy passes its cotangent on, in the argument's own dtype and on its own device. A constructor takes only a
shape from its argument, so nothing flows back through it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import ACTIVE, VIEWED, Arg, Equation, Value
from tessera.ir.types import Size
from tessera.ops.families import call, carry, fit, pad_rank, sum_to, view
from tessera.ops.op import declare
from tessera.ops.tied import TIED
from tessera.util.names import names

PLAIN_FORMATS = (None, 0, torch.contiguous_format, torch.preserve_format)


def batched_format(memory_format: Arg) -> Arg:
    """A format that speaks of channels has no meaning once there is a batch dimension more."""
    return memory_format if memory_format in PLAIN_FORMATS else None


def _home(ct: Value, x: Value) -> Value:
    """A cotangent as its argument wants it: that dtype, that device."""
    changes: dict[str, Arg] = {}
    if ct.dtype != x.dtype:
        changes["dtype"] = x.dtype
    if ct.tensor.device != x.tensor.device:
        changes["device"] = x.tensor.device
    return aten._to_copy(ct, **changes) if changes else ct


# --- copies of one tensor -------------------------------------------------------------------------

view("aten.alias", lambda ct, x: ct, lambda size, on, x: aten.alias(x))
view("aten.lift_fresh_copy", lambda ct, x: ct, lambda size, on, x: aten.clone(x), free=False)
view(
    "aten.contiguous.default",
    lambda ct, x, memory_format: ct,
    lambda size, on, x, memory_format: aten.contiguous(x),
    free=False,
)
view(
    "aten.clone",
    lambda ct, x, memory_format: ct,
    lambda size, on, x, memory_format: aten.clone(x, memory_format=batched_format(memory_format)),
    free=False,
)
declare("aten.detach", "view", batch=lambda size, on, x: aten.detach(x), zero=True, free=True)


def _strided(eqn: Equation) -> bool:
    return eqn.kwargs.get("layout") in (None, torch.strided)


def _to_copy_batch(size: Size, on: Sequence[bool], x: Value, memory_format: Arg = None, **kw: Arg) -> Value:
    return aten._to_copy(x, memory_format=batched_format(memory_format), **kw)


declare(
    "aten._to_copy",
    "copy",
    vjp=lambda ct, y, x, **kw: (lambda: _home(ct, x),),
    jvp=lambda ts, y, x, **kw: aten._to_copy(ts[0], **kw),
    batch=_to_copy_batch,
    applies=_strided,
)

# --- one tensor's contents replaced by another's --------------------------------------------------


def _overwritten(ct: Value) -> Value:
    """The gradient of what was there. Autograd writes zeros into a view of `ct` where a view was written: the gradient
    then has the history of `ct`."""
    zeros = aten.zeros_like(ct)
    return emit(TIED, zeros, ct) if VIEWED in ACTIVE[-1].tags else zeros  # type: ignore[attr-defined]


def _copy_vjp(ct: Value, y: Value, x: Value, src: Value, non_blocking: bool) -> tuple:
    return lambda: _overwritten(ct), lambda: _home(sum_to(ct, src), src)


def _copy_jvp(ts: Sequence[Value | None], y: Value, x: Value, src: Value, non_blocking: bool) -> Value:
    return aten.zeros_like(y) if ts[1] is None else fit(_home(ts[1], y), y)


def _copy_batch(size: Size, on: Sequence[bool], x: Value, src: Value, non_blocking: bool) -> Value:
    base = carry(x, on[0], size)
    return aten.copy(base, pad_rank(src, base.ndim) if on[1] else src, non_blocking)


declare("aten.copy", "copy", vjp=_copy_vjp, jvp=_copy_jvp, batch=_copy_batch)


def _fill_batch(size: Size, on: Sequence[bool], x: Value, value: Arg) -> Value:
    base = carry(x, on[0], size)
    if isinstance(value, Value) and on[1]:
        return aten.copy(base, pad_rank(value, base.ndim))
    return aten.fill(base, value)


declare(
    "aten.fill.Scalar",
    "copy",
    vjp=lambda ct, y, x, value: (lambda: _overwritten(ct),),
    jvp=lambda ts, y, x, value: aten.zeros_like(y),
    batch=_fill_batch,
)
declare(
    "aten.fill.Tensor",
    "copy",
    vjp=lambda ct, y, x, value: (lambda: _overwritten(ct), lambda: aten.sum(ct)),
    jvp=lambda ts, y, x, value: aten.zeros_like(y) if ts[1] is None else fit(ts[1], y),
    batch=_fill_batch,
)
declare(
    "aten.zero",
    "copy",
    vjp=lambda ct, y, x: (lambda: _overwritten(ct),),
    jvp=lambda ts, y, x: aten.zeros_like(y),
    batch=lambda size, on, x: aten.zero(x),
)

# One number everywhere.
FILLS = names("zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor")

# --- constructors ---------------------------------------------------------------------------------


def _like(name: str) -> None:
    """A tensor shaped like its argument."""

    def batch(size: Size, on: Sequence[bool], x: Value, *args: Arg, memory_format: Arg = None, **kw: Arg) -> Value:
        return again(x, *args, memory_format=batched_format(memory_format), **kw)

    again = call(name)
    declare(name, "constructor", batch=batch, zero=True)


for _name in ("zeros_like", "ones_like", "full_like", "empty_like"):
    _like(f"aten.{_name}")


def _new(name: str) -> None:
    """A tensor of a given shape, with its argument's dtype and device: the same for every row of a batch."""

    def batch(size: Size, on: Sequence[bool], x: Value, shape: Sequence[Size], *args: Arg, **kw: Arg) -> Value:
        return again(x, [size, *shape], *args, **kw)

    again = call(name)
    declare(name, "constructor", batch=batch, zero=True)


for _name in ("new_zeros", "new_ones", "new_full", "new_empty"):
    _new(f"aten.{_name}")
