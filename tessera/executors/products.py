"""When a matrix product is worth a kernel of our own.

A library's product is hard to beat; a kernel of ours wins by what it does not move: what is computed from the product
point by point is computed before it is written. `refusal` says why an equation can be in no such kernel, `loses` why a
kernel would be slower than the library's product and a kernel after it, by the figures of the device's machine.
"""

from __future__ import annotations

import math

import torch

from tessera.ir.equation import Equation, Value
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, size_hint
from tessera.machines import machine_of
from tessera.ops.uniform import uniform
from tessera.tile.from_trace.lower.rule import CONTRACT, Call, rule_of
from tessera.tile.targets import Target
from tessera.torch_internals.operators import op_name

# What our kernels lose of the library's rate, as shares that were measured on an H200; the rates are the machine's own
LOSS = 0.01  # one product whose operands are contiguous along the depth, tiles by bulk copies
STORING = 2.8  # bytes that could be moved while an element of its result is stored, and no tile is multiplied
BESIDE_LOSS = 0.15  # two products in one kernel
PLAIN_LOSS = 0.25  # every thread computes addresses
ACROSS_LOSS = 0.5  # an operand is contiguous across the depth, as in the gradient of a weight
MOST_MOVED = 1  # tensors of about the result's size, besides the operands: the result itself
SMALLEST = 128  # rows and columns from which tiles fill the matrix units
HALF = (torch.bfloat16, torch.float16)


def refusal(eqn: Equation, target: Target) -> str:
    """Why a product stays with the library whatever is around it; empty where it may not. `target`: its device's."""
    out = eqn.out.tensor
    if out.device.type == "cpu":
        return _on_cpu(eqn, target)
    if out.dtype not in HALF:
        return f"matrix products of {out.dtype} stay with the library"
    rows = math.prod(map(size_hint, out.shape[:-1]))
    if min(rows, size_hint(out.shape[-1])) < SMALLEST:
        return "too few rows or columns for tiles of a product"
    return ""


def _on_cpu(eqn: Equation, target: Target) -> str:
    """Linear layers over few rows have kernels (`targets/cpu/product`)."""
    weight, sizes = eqn.args[1], [n for v in eqn.inputs() for n in v.shape]
    fits = op_name(eqn.op) == "linear" and eqn.out.dtype == torch.float32 and all(type(n) is int for n in sizes)  # type: ignore[union-attr]
    if not fits or not all(v.tensor.is_row_major for v in eqn.inputs()):
        return "matrix products stay with the library on a CPU, but for linear layers over few rows"
    columns, depth = weight.shape  # type: ignore[union-attr]
    return target.no_product(math.prod(eqn.out.shape[:-1]), columns, depth)


def loses(products: list[Equation], body: Trace, saved: int | None) -> str:
    """Why one kernel that moves `saved` bytes less is no faster than the library's products; empty where it is.

    A tile that is not yet stored stops the next one: whatever else it has to fetch or to write counts much more than
    its bytes (an H200 took 1.5 times as long for a product that reads one more matrix of its result's size)."""
    if products[0].out.tensor.device.type == "cpu":  # `refusal` has weighed them
        return ""
    operands = {v for eqn in products for v in _sides(eqn)[0]}
    least = products[0].out.tensor.nbytes() / 8
    moved = [v for v in (*body.inputs, *body.outputs) if isinstance(v, Value) and isinstance(v.type, TensorType)]
    instead = len(operands.difference(body.inputs))  # of operands that are views, or computed on the way
    if sum(v not in operands and v.tensor.nbytes() > least for v in moved) > MOST_MOVED + instead:
        return "the product's kernel would read or write more than the product"
    if saved is None:
        return ""
    machine, lost = machine_of(products[0].out.tensor.device), 0.0
    for eqn in products:
        sides, flipped = _sides(eqn)
        flops = 2 * eqn.out.tensor.numel() * size_hint(sides[0].shape[-1])
        moved = sum(v.tensor.nbytes() for v in (*sides, eqn.out))
        share, stored = (LOSS, STORING) if len(products) == 1 else (BESIDE_LOSS, 0.0)
        if not (machine.copies_in_bulk and all(copies_in_bulk(v) for v in sides)):
            share, stored = PLAIN_LOSS, 0.0
        if not _along_depth(*sides, flipped):
            share, stored = max(share, ACROSS_LOSS), 0.0
        lost += share * max(flops / machine.matrix_flops, moved / machine.bandwidth)
        lost += stored * eqn.out.tensor.numel() / machine.bandwidth
    gained = saved / machine.bandwidth
    if gained > lost:
        return ""
    return f"the library's product is {lost * 1e6:.0f} µs faster, the bytes saved are worth {gained * 1e6:.0f} µs"


def beside(body: Trace) -> str:
    """Why what stands beside a product in a region makes no kernel with it; empty where there is no product.

    Random numbers: a thread of a product holds two neighbours, not the four that share a block of random words, and the
    matrix units would wait for the arithmetic of the others. On a CPU a second product, or an operand that is computed.
    """
    rules = ((eqn, rule_of(eqn.op)) for eqn in body.equations)
    products = [eqn for eqn, rule in rules if rule is not None and rule.kind == CONTRACT]
    if not products:
        return ""
    if any(eqn.op is uniform for eqn in body.equations):
        return "random numbers are computed after a product, not beside it"
    if products[0].out.tensor.device.type != "cpu":
        return ""
    computed = any(v not in body.inputs for v in _sides(products[0])[0])
    return "a product on a CPU stands alone and reads its operands from memory" if computed or products[1:] else ""


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
