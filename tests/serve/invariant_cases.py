"""Deterministic kernels on `device`: a row gives the same bits whoever else is there, and however sums are shared out.

Run as a program with TRITON_INTERPRET=1, the kernels run as Python on the CPU; `test_invariant` does that, and calls
the same functions on a GPU.
"""

from __future__ import annotations

from unittest import mock

import torch
from paged_cases import inputs
from torch import Tensor

from tessera.serve import invariant_kernels
from tessera.serve.operators import _attention


def attention_stands_alone(device: str, dtype: torch.dtype, heads: int = 4, groups: int = 2, head: int = 32) -> int:
    """One sequence whole, in chunks, token by token, beside others and in wider tables, its parts kept or not."""
    torch.manual_seed(0)
    length = 150
    q, keys, values, tables, _, positions = inputs([(0, length), (0, 40)], heads, groups, head, head, dtype, device)
    chunks = [[0, 150], [0, 37, 38, 150], [0, 1, 2, 3, 64, 128, 149, 150]]
    count = 0
    for window, softcap in ((0, 0.0), (70, 3.0)):
        first = None
        for cut in chunks:
            seen: list[Tensor] = []
            for beside, keeps in ((False, True), (True, True), (True, False)):
                own = torch.tensor(cut, device=device)
                rows = tables[:1].expand(len(cut) - 1, -1)
                given, at = q[:length], positions[:length]
                if beside:  # another sequence comes first, and tables are wider
                    own = torch.cat([own.new_zeros(1), own + 40])
                    rows = torch.cat([tables[1:], rows])
                    rows = torch.cat([rows, torch.zeros_like(rows)], 1)
                    given, at = torch.cat([q[length:], given]), torch.cat([positions[length:], at])
                step = (given, keys, values, rows.contiguous(), own, at, head**-0.5, window, softcap)
                limits = {"KEYS": 64} if keeps else {"KEYS": 64, "SCRATCH": 0}
                with mock.patch.multiple(invariant_kernels, **limits):
                    found = invariant_kernels.attention(*step)
                if first is None:
                    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
                    wanted = _attention(*step, True)
                    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
                    first = found
                seen.append(found[-length:])
                count += 1
            assert all(torch.equal(one, seen[0]) for one in seen), (window, softcap, cut)
            assert same(seen[0], first), (window, softcap, cut)
    return count


def products_stand_alone(device: str, dtype: torch.dtype, k: int = 130, n: int = 140) -> int:
    """Rows alone, in crowds of any size, at any place; tiles of all sizes; parts kept or not."""
    torch.manual_seed(1)
    x = torch.randn(140, k, device=device).to(dtype)
    weight, bias = (torch.randn(*shape, device=device).to(dtype) for shape in ((n, k), (n,)))
    turned = weight.t().contiguous().t()  # as `addmm` has it
    count, first = 0, None
    wanted = torch.nn.functional.linear(x[-1].double(), weight.double(), bias.double())
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    with mock.patch.multiple(invariant_kernels, PART=64, MOST_PARTS=3):
        for tile in invariant_kernels.TILES:
            seen = []
            for scratch, given in ((1 << 26, weight), (0, weight), (1 << 26, turned)):
                with mock.patch.multiple(invariant_kernels, SCRATCH=scratch, TILES=(tile,)):
                    for rows in (1, 140):
                        seen.append(invariant_kernels.linear(x[-rows:], given, bias)[-1])
                        count += 1
            torch.testing.assert_close(seen[0].double(), wanted, rtol=tolerance, atol=tolerance * k**0.5)
            first = seen[0] if first is None else first
            assert all(torch.equal(one, seen[0]) for one in seen) and same(seen[0], first), tile
    return count


def same(a: Tensor, b: Tensor) -> bool:
    """On a GPU: the same bits. As Python NumPy multiplies, and the order of its sums depends on how large tiles are."""
    return torch.equal(a, b) if a.is_cuda else torch.allclose(a, b, rtol=2e-5, atol=2e-5)


if __name__ == "__main__":
    print(attention_stands_alone("cpu", torch.float32) + products_stand_alone("cpu", torch.float32))
