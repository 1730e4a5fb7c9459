"""Sharding rules of what packs equal blocks along a dimension, and of what takes them out again.

    q, k, v = qkv.chunk(3, -1)        ... (k w) -> ... w, ... w, ... w
    qkv = cat([q, k, v], -1)          ... w, ... w, ... w -> ... (k w)

Blocks are a factor that must be whole, and what is inside of each is one that may be cut: an axis that cuts every block
(`[3072/tp:3]`) has a part of each, so that nothing moves. An axis that cuts plainly has other blocks on other ranks.
"""

from __future__ import annotations

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ops.factors.rule import Cut, Dims, Factors, Local

BLOCKS, WITHIN = "blocks", "within"


def _dims(rank: int, dim: int, *there: str) -> Dims:
    return tuple(there if i == dim else (f"d{i}",) for i in range(rank))


def equal_blocks(whole: Value, parts: list[Value], dim: int) -> int | None:
    """How many blocks of the size of each part a dimension is made of; None where parts differ or are no such."""
    size, *sizes = (x.shape[dim] for x in (whole, *parts))
    part = sizes[0]
    if type(size) is not int or type(part) is not int or len(set(map(str, sizes))) > 1:
        return None
    return size // part if 0 < part < size and size % part == 0 else None


def unpacked(x: Value, parts: list[Value], dim: int, local: Local) -> Factors | None:
    """Of an operator that takes blocks out."""
    count = equal_blocks(x, parts, dim)
    if count is None:
        return None
    results = tuple(_dims(x.ndim, dim, WITHIN) for _ in parts)
    return _factors((_dims(x.ndim, dim, BLOCKS, WITHIN),), results, {BLOCKS: count, WITHIN: parts[0].shape[dim]}, local)


def packed(parts: list[Value], out: Value, dim: int, local: Local | None = None) -> Factors | None:
    """Of an operator that puts blocks side by side, or one of them among zeros."""
    alike = all(x.ndim == out.ndim for x in parts)  # a list without elements may be joined to anything
    count = equal_blocks(out, parts, dim) if alike else None
    if count is None:
        return None
    operands = tuple(_dims(out.ndim, dim, WITHIN) for _ in parts)
    sizes = {BLOCKS: count, WITHIN: parts[0].shape[dim]}
    return _factors(operands, (_dims(out.ndim, dim, BLOCKS, WITHIN),), sizes, local)


def _factors(operands: tuple[Dims, ...], results: tuple[Dims, ...], sizes: dict, local: Local | None) -> Factors:
    linear = (frozenset(range(len(operands))),)
    whole = frozenset([BLOCKS])
    return Factors(operands, results, whole=whole, linear=linear, sizes=sizes, local=local, merges=True)


# --- what a rank does, whose blocks are smaller ---------------------------------------------------


def split_here(dim: int) -> Local:
    def local(eqn: Equation, cut: Cut) -> object:
        return aten.split_with_sizes(eqn.args[0], [cut.sizes(i)[dim] for i in range(len(eqn.outputs))], dim)

    return local


def slice_here(dim: int, block: int) -> Local:
    def local(eqn: Equation, cut: Cut) -> object:
        size = cut.sizes()[dim]
        return aten.slice(eqn.args[0], dim, block * size, (block + 1) * size)

    return local


def slice_backward_here(dim: int, block: int) -> Local:
    def local(eqn: Equation, cut: Cut) -> object:
        ct = eqn.args[0]
        size = ct.shape[dim]  # type: ignore[union-attr]
        return aten.slice_backward(ct, cut.sizes(), dim, block * size, (block + 1) * size, 1)

    return local
