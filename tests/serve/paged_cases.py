"""The kernels of paged attention beside the reference, on `device`. Prints how many cases agreed.

Run as a program with TRITON_INTERPRET=1, the kernels run as Python on the CPU; `test_paged_kernels` does that, and
calls `check` itself on a GPU.
"""

from __future__ import annotations

import itertools
import sys
from unittest import mock

import torch
from torch import Tensor

from tessera.serve import invariant_kernels, paged_kernels
from tessera.serve.operators import FP8, _attention

SIZE = 16
# First and last token of every sequence: prompts, chunks of them, single tokens short and long, nobody.
MIXED = [(0, 70), (33, 40), (9, 10), (300, 301), (0, 0), (0, 1)]
ONES = [(3, 4), (290, 291), (255, 256), (64, 65)]


def inputs(
    spans: list[tuple[int, int]], heads: int, groups: int, head: int, value: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, ...]:
    """A flat row of queries over pools whose unused places hold numbers that would spoil everything."""
    columns = max(-(-end // SIZE) for _, end in spans) + 1
    order = torch.randperm(len(spans) * columns) + 1
    tables = order.view(len(spans), columns).to(device)
    pools = [torch.randn(len(order) + 1, SIZE, groups, n, device=device) for n in (head, value)]
    for pool in pools:
        pool[0] = 1e4 if dtype is torch.float16 else 1e30
    tokens = sum(end - first for first, end in spans)
    q = torch.randn(heads, tokens, head, device=device).transpose(0, 1)
    starts = torch.tensor([0, *(end - first for first, end in spans)], device=device).cumsum(0)
    positions = torch.cat([torch.arange(*span, device=device) for span in spans])
    return q.to(dtype), *(pool.to(dtype) for pool in pools), tables, starts, positions


def agree(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


SHAPES = {"cpu": [(4, 2, 64, 64), (3, 1, 80, 48)], "cuda": [(4, 2, 64, 64), (32, 8, 128, 128), (8, 1, 256, 256)]}


def check(device: str, dtype: torch.dtype, most: int = 3) -> int:
    """So many of the shapes."""
    torch.manual_seed(0)
    count = 0
    shapes = SHAPES[device][:most]
    for (heads, groups, head, value), spans in itertools.product(shapes, (MIXED, ONES)):
        given = inputs(spans, heads, groups, head, value, dtype, device)
        for window, softcap, single in ((0, 0.0, False), (40, 0.0, False), (0, 3.0, False), (300, 0.0, True)):
            settings = (head**-0.5, window, softcap, single)
            found = invariant_kernels.attention if single else paged_kernels.paged_attention
            agree(found(*given, *settings[:3]), _attention(*given, *settings), dtype)
            count += 1
        q, keys, values, *rest = given
        small = (q, keys.clamp(-9, 9).to(FP8), values.clamp(-9, 9).to(FP8), *rest, head**-0.5, 0, 0.0)
        agree(paged_kernels.paged_attention(*small), _attention(*small, False), dtype)
        count += 1
    return count


def check_parts(device: str, dtype: torch.dtype) -> int:
    """Sequences with several new tokens, split along their keys, beside one too short for it and a single token."""
    torch.manual_seed(1)
    heads, groups, head, value = SHAPES[device][0]
    given = inputs([(250, 283), (0, 20), (99, 100), (0, 0), (60, 130)], heads, groups, head, value, dtype, device)
    whole = ((0, 0.0), (40, 0.0), (170, 3.0))
    with mock.patch.multiple(paged_kernels, MANY_SPLIT=32):
        for window, softcap in whole:
            settings = (head**-0.5, window, softcap)
            agree(paged_kernels.paged_attention(*given, *settings), _attention(*given, *settings, False), dtype)
    return len(whole)


def rows_stand_alone(device: str, dtype: torch.dtype) -> bool:
    """A token that decodes gives the same bits in any crowd."""
    q, keys, values, tables, starts, positions = inputs([(0, 90)], 4, 2, 64, 64, dtype, device)
    last = paged_kernels.paged_attention(
        q[-1:], keys, values, tables, starts.clamp(max=1), positions[-1:], 0.125, 0, 0.0
    )
    wide = torch.cat([tables, tables], 1).expand(3, -1).contiguous()  # the same token thrice, in a wider table
    crowd = paged_kernels.paged_attention(
        q[-1:].expand(3, -1, -1), keys, values, wide, torch.arange(4, device=device), positions[-1:].repeat(3), 0.125,
        0, 0.0,
    )  # fmt: skip
    return torch.equal(last.expand(3, -1, -1), crowd)


if __name__ == "__main__":
    assert rows_stand_alone("cpu", torch.float32)
    print(check_parts("cpu", torch.float32) + check("cpu", torch.float32, int(sys.argv[1])))
