"""Attention of a few queries over many keys, by a kernel of our own.

In: an equation `aten.scaled_dot_product_attention` with at most sixteen queries and several query heads for every key
head. Out: a callable that reads keys and values once for all of them: the rows of a block are the queries of a whole
group (`tile/attention`), and the keys are shared out to enough programs to fill the GPU, whose parts a second kernel
joins. Everything else is left to the executors after this one, whose kernels are hard to beat there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from tessera.executors.base import OperatorExecutor, register
from tessera.ir.equation import Equation, Value
from tessera.ir.types import size_hint
from tessera.machines import Machine
from tessera.tile.attention import Attention, attention, attention_parts, attention_whole
from tessera.tile.dialect.elements import element_of_dtype
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets import CompiledKernel, Target, target_for
from tessera.torch_internals.operators import aten_name
from tessera.util.powers import power_below, power_of_two

NAME = "scaled_dot_product_attention"
TAKEN = (torch.bfloat16, torch.float16, torch.float32)
MOST_QUERIES, MOST_ROWS, WIDEST = 16, 64, 256  # of a group in one block, whose rows and width stay in registers
FEWEST_KEYS = 256  # with fewer, one launch of the library's is done before two of ours
PROGRAMS = 2  # a multiprocessor: one loads while the other computes
MOST_PARTS, SHORTEST_PART = 32, 128  # of the keys: joining more costs more than they save; two steps of a program


def claims(eqn: Equation) -> Callable | None:
    if aten_name(eqn.op) != NAME or refusal(eqn):
        return None
    strides = [size_hint(s) for s in eqn.out.tensor.stride]
    target = target_for(eqn.out.tensor.device)
    assert target is not None
    return attends(tuple(sorted(range(4), key=lambda d: -strides[d])), target)


def refusal(eqn: Equation) -> str:
    """Why this call is left to other executors; empty where it is ours."""
    positional, keyword = eqn.bound()
    query, key, value, mask, dropout, causal = positional[:6]
    assert isinstance(query, Value) and isinstance(key, Value) and isinstance(value, Value)
    if target_for(query.tensor.device) is None or query.tensor.device.type != "cuda":
        return "our kernel runs on CUDA"
    if query.dtype not in TAKEN or {query.ndim, key.ndim, value.ndim} != {4} or dropout:
        return "our kernel takes 16 or 32 bits, four dimensions and no dropout"
    sizes = (*query.shape[1:], key.shape[1], key.shape[3], value.shape[3])
    if not all(isinstance(n, int) for n in sizes):
        return "its heads, queries and widths are known only at run time"
    heads, queries, width, shared, _, values = sizes
    if queries > MOST_QUERIES or size_hint(key.shape[2]) < FEWEST_KEYS:
        return "many queries or few keys: flash attention"
    if heads == shared or heads % shared or not keyword.get("enable_gqa") or heads // shared * queries > MOST_ROWS:
        return "no group of heads that share keys"
    if max(width, values) > WIDEST or width % 8 or values % 8:
        return f"heads of width {width} and {values}"
    if isinstance(mask, Value) and (mask.dtype not in (torch.bool, query.dtype) or mask.ndim > 4):
        return f"a mask of {mask.dtype}"
    return "a mask beside causal order" if mask is not None and causal else ""


def _why(eqn: Equation) -> str:
    return refusal(eqn) or "keys read once for a group of heads"


@functools.cache
def attends(order: tuple[int, ...], target: Target) -> Callable[..., Tensor]:
    """Attention whose result lies in memory with its dimensions in this order, from the widest stride on."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        shape = (*query.shape[:3], value.shape[3])
        out = query.new_empty([shape[d] for d in order]).permute([order.index(d) for d in range(4)])
        scale = query.shape[3] ** -0.5 if scale is None else scale
        run(target, query, key, value, attn_mask, is_causal, scale, out)
        return out

    return attend


def run(
    target: Target, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, out: Tensor
) -> None:
    """Write attention into `out`."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, queries, width = q.shape
    shared, keys = k.shape[1], k.shape[2]
    group = heads // shared
    kind = "" if mask is None else "where" if mask.dtype is torch.bool else "add"
    inputs = [q, k, v]
    symbols = [batch, shared, queries, keys, *(s for x in (q, k, v, out) for s in x.stride()[:3])]
    if mask is not None:
        mask = mask.expand(batch, heads, queries, keys)
        inputs.append(mask)
        symbols += mask.stride()
    of = Attention(width, v.shape[3], group, queries, True, causal, scale, kind, element_of_dtype(q.dtype))
    parts = parts_for(batch * shared, keys, target.machine)
    if parts == 1:
        _kernel(target, "attention", of, 1)([*inputs, out], symbols)
        return
    rows = parts * batch * heads * queries
    sums, maxima, totals = (q.new_empty(rows * n, dtype=torch.float32) for n in (v.shape[3], 1, 1))
    _kernel(target, "parts", of, parts)([*inputs, sums, maxima, totals], symbols)
    _kernel(target, "whole", of, parts)([sums, maxima, totals, out], symbols)


def parts_for(groups: int, keys: int, machine: Machine) -> int:
    """Programs that share the keys of a row: enough to fill the GPU, each with enough to read."""
    wanted = min(-(-PROGRAMS * machine.units // max(groups, 1)), keys // SHORTEST_PART, MOST_PARTS)
    return power_below(wanted)


@functools.cache
def _kernel(target: Target, which: str, of: Attention, parts: int) -> CompiledKernel:
    if which == "whole":
        wide = max(power_of_two(of.values), 2)
        return target.compile(attention_whole(of, parts), Schedule((("c", wide), ("p", parts))))
    kernel = attention(of) if which == "attention" else attention_parts(of, parts)
    sizes = dict.fromkeys(of.symbols, 4096)
    return target.compile(kernel, target.propose(kernel, sizes)[0])


register(OperatorExecutor("attention", claims, why=_why))
