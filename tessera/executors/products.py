"""When a matrix product is worth a kernel of our own.

A library's product is hard to beat; a kernel of ours wins by what it does not move: what is computed from the product
point by point is computed before it is written. `refusal` says why an equation can be in no such kernel, `loses` why a
kernel would be slower than the library's product and a kernel after it. The rates are measured ones (`tile/cost`).
"""

from __future__ import annotations

import math

import torch

from tessera.ir.equation import Equation, Value
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, size_hint
from tessera.ops.uniform import uniform
from tessera.tile.cost import H200
from tessera.tile.lower import CONTRACT, Call, rule_of

# What our kernels lose of the library's rate, as measured on an H200
LOSS = 0.01  # one product whose operands are contiguous along the depth, tiles by bulk copies
STORING = 0.7e-12  # seconds for each element of its result: no tile is multiplied while one is stored
BESIDE_LOSS = 0.15  # two products in one kernel
PLAIN_LOSS = 0.25  # every thread computes addresses
ACROSS_LOSS = 0.5  # an operand is contiguous across the depth, as in the gradient of a weight
MOST_MOVED = 1  # tensors of about the result's size, besides the operands: the result itself
SMALLEST = 128  # rows and columns from which tiles fill the matrix units
HALF = (torch.bfloat16, torch.float16)


def refusal(eqn: Equation) -> str:
    """Why a product stays with the library whatever is around it; empty where it may not."""
    out = eqn.out.tensor
    if out.device.type == "cpu":
        return "matrix products stay with the library on a CPU"
    if out.dtype not in HALF:
        return f"matrix products of {out.dtype} stay with the library"
    rows = math.prod(map(size_hint, out.shape[:-1]))
    if min(rows, size_hint(out.shape[-1])) < SMALLEST:
        return "too few rows or columns for tiles of a product"
    return ""


def loses(products: list[Equation], body: Trace, saved: int | None) -> str:
    """Why one kernel that moves `saved` bytes less is no faster than the library's products; empty where it is.

    A tile that is not yet stored stops the next one: whatever else it has to fetch or to write counts much more than
    its bytes (an H200 took 1.5 times as long for a product that reads one more matrix of its result's size)."""
    operands = {v for eqn in products for v in _sides(eqn)[0]}
    least = products[0].out.tensor.nbytes() / 8
    moved = [v for v in (*body.inputs, *body.outputs) if isinstance(v, Value) and isinstance(v.type, TensorType)]
    instead = len(operands.difference(body.inputs))  # of operands that are views, or computed on the way
    if sum(v not in operands and v.tensor.nbytes() > least for v in moved) > MOST_MOVED + instead:
        return "the product's kernel would read or write more than the product"
    if saved is None:
        return ""
    lost = 0.0
    for eqn in products:
        sides, flipped = _sides(eqn)
        flops = 2 * eqn.out.tensor.numel() * size_hint(sides[0].shape[-1])
        moved = sum(v.tensor.nbytes() for v in (*sides, eqn.out))
        share, stored = (LOSS, STORING) if len(products) == 1 else (BESIDE_LOSS, 0.0)
        if not all(copies_in_bulk(v) for v in sides):
            share, stored = PLAIN_LOSS, 0.0
        if not _along_depth(*sides, flipped):
            share, stored = max(share, ACROSS_LOSS), 0.0
        lost += share * max(flops / H200.matrix_flops, moved / H200.bandwidth) + stored * eqn.out.tensor.numel()
    gained = saved / H200.bandwidth
    if gained > lost:
        return ""
    return f"the library's product is {lost * 1e6:.0f} µs faster, the bytes saved are worth {gained * 1e6:.0f} µs"


def draws_beside(body: Trace) -> str:
    """Why a product and random numbers are no kernel: a thread of a product holds two neighbours, not the four that
    share a block of random words, and the matrix units would wait for the arithmetic of the others."""
    found = any(eqn.op is uniform for eqn in body.equations)
    kinds = (rule_of(eqn.op) for eqn in body.equations)
    multiplies = found and any(rule is not None and rule.kind == CONTRACT for rule in kinds)
    return "random numbers are computed after a product, not beside it" if multiplies else ""


def _sides(eqn: Equation) -> tuple[tuple[Value, Value], bool]:
    rule = rule_of(eqn.op)
    assert rule is not None and rule.sides is not None
    return rule.sides(Call.of(eqn)), rule.flipped


def _along_depth(lhs: Value, rhs: Value, flipped: bool) -> bool:
    """Both operands, (m, k) and (k, n) or flipped (n, k), are contiguous along k."""
    return size_hint(lhs.tensor.stride[-1]) == 1 and size_hint(rhs.tensor.stride[-1 if flipped else -2]) == 1


def copies_in_bulk(v: Value) -> bool:
    """Whether tiles of a matrix can come by the GPU's bulk copies: rows or columns contiguous, the rest aligned."""
    assert isinstance(v.type, TensorType)
    strides = [size_hint(s) for s, n in zip(v.type.stride, v.type.shape, strict=True) if size_hint(n) > 1]
    units = [s for s in strides if s == 1]
    aligned = all(s * v.type.dtype.itemsize % 16 == 0 for s in strides if s not in (0, 1))
    return len(units) == 1 and aligned and 1 in map(size_hint, v.type.stride[-2:])
