"""Sums of bags of rows on a GPU: the Triton program.

A program takes a block of bags and of columns, and walks its bags side by side, `STEP` rows of each at a time, whose
addresses and rows are asked for together. Sums are kept in `ACC` and rounded once; a bag's rows are added in their
order, whatever else runs. Nothing is read at an index out of range; the program asserts, as PyTorch's does.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bag_kernel(
    rows, order, starts, weights, out, bags, many, entries, width, padding, across, along, blocks,
    COLUMNS: tl.constexpr, LAST: tl.constexpr, WEIGHTED: tl.constexpr, PADDED: tl.constexpr, MEAN: tl.constexpr,
    ACC: tl.constexpr, BAGS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`out[b]`: the sum of `rows[order[j]]`, j from `starts[b]` on, of `many` rows of `width` columns; with LAST,
    `starts` says where the last of the bags ends. Neighbours in memory belong to one column with COLUMNS, else to one
    row, in `rows` and in `out`; `blocks` of programs lie along that."""
    near, far = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    block, part = (near, far) if COLUMNS else (far, near)
    bag = block.to(tl.int64) * BAGS + tl.arange(0, BAGS)
    column = part * WIDTH + tl.arange(0, WIDTH)
    inside, wide = bag < bags, column < width
    start = tl.load(starts + bag, mask=inside, other=0).to(tl.int64)
    end = tl.load(starts + bag + 1, mask=inside & ((bag + 1 < bags) | LAST), other=entries).to(tl.int64)
    end = tl.where(inside, end, start)
    right = (start >= 0) & (end >= start) & (end <= entries)
    end = tl.where(right, end, start)
    total = tl.zeros((BAGS, WIDTH), ACC)
    counted = tl.zeros((BAGS,), tl.int32)
    for first in range(0, tl.max(end - start, axis=0), STEP):
        for step in tl.static_range(STEP):
            at = start + first + step
            there = at < end
            row = tl.load(order + at, mask=there, other=0).to(tl.int64)
            right = right & (row >= 0) & (row < many)
            there = there & (row >= 0) & (row < many)
            if PADDED:
                there = there & (row != padding)
            here = rows + row[:, None] * across + column[None, :].to(tl.int64) * along
            read = tl.load(here, mask=there[:, None] & wide[None, :], other=0.0).to(ACC)
            if WEIGHTED:
                read = read * tl.load(weights + at, mask=there, other=0.0).to(ACC)[:, None]
            total += read
            if MEAN:
                counted += there.to(tl.int32)
    tl.device_assert(right, "bag_sum: index out of range")
    if MEAN:
        total = total / tl.maximum(counted, 1).to(ACC)[:, None]
    if COLUMNS:
        place = out + bag[:, None] + column[None, :].to(tl.int64) * bags
    else:
        place = out + bag[:, None] * width + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside[:, None] & wide[None, :])
