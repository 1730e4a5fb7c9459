"""Every kernel of `runtime/decode` against the operator it stands for, on `device`. Prints how many agreed.

Run as a program with TRITON_INTERPRET=1, the kernels run as Python on the CPU; `test_decode` does that, and calls
`check` itself on a GPU.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tessera.ops import rows as meaning
from tessera.runtime import decode


def agree(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    error = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert error <= tolerance, f"relative error {error:.4f}"


def linears(device: str, dtype: torch.dtype) -> int:
    count = 0
    for rows, kind, k, form in itertools.product(
        (1, 3), ("", "int8", "int4", "fp8"), (384,), ("norm", "gate", "residual", "bias")
    ):
        sizes = {"norm": (20, 9, 16), "gate": (20, 20), "residual": (20,), "bias": (9, 20)}[form]
        x = torch.randn(rows, 1, k, device=device, dtype=dtype)
        full = [torch.randn(n, k, device=device, dtype=dtype) / k**0.5 for n in sizes]
        stored = [meaning.quantized(w, kind) for w in full] if kind else [(w, None) for w in full]
        args = (
            x,
            [w for w, _ in stored],
            [s for _, s in stored if s is not None],
            [torch.randn(n, device=device, dtype=dtype) for n in sizes] if form == "bias" else [],
            torch.randn(k, device=device, dtype=dtype) if form in ("norm", "gate") else None,
            1e-5,
            torch.randn(rows, 1, 20, device=device, dtype=dtype) if form == "residual" else None,
            "silu" if form == "gate" else "",
            kind,
        )
        for found, wanted in zip(decode.rows_linear(*args), meaning.rows_linear(*args), strict=True):
            agree(found, wanted, 2e-2)
        count += 1
    return count


def attentions(device: str, dtype: torch.dtype) -> int:
    count = 0
    for (batch, heads, groups, length, head), form in itertools.product(
        ((1, 8, 2, 100, 64), (2, 4, 4, 130, 32)), ("position", "bool", "float", "all")
    ):
        q = torch.randn(batch, 1, heads, head, device=device, dtype=dtype).transpose(1, 2)
        k, v = (torch.randn(batch, groups, length, head, device=device, dtype=dtype) for _ in range(2))
        position = torch.tensor([70], device=device)
        mask = {
            "bool": torch.rand(batch, 1, 1, length, device=device) > 0.5,
            "float": torch.randn(1, 1, 1, length, device=device, dtype=dtype),
        }.get(form)
        turn = torch.randn(2, 1, head, device=device, dtype=dtype)
        args = (q, k, v, position if form == "position" else None, mask, turn, head**-0.5)
        agree(decode.decode_attention(*args), meaning.decode_attention(*args), 2e-2)
        caches = [torch.zeros_like(k) for _ in range(2)]
        new = torch.randn(batch, 1, groups, head, device=device, dtype=dtype).transpose(1, 2)
        decode.cache_write(caches[0], new, position, turn)
        meaning.cache_write(caches[1], new, position, turn)
        agree(caches[0], caches[1], 1e-2)
        count += 1
    return count


def check(device: str, dtype: torch.dtype) -> int:
    torch.manual_seed(0)
    return linears(device, dtype) + attentions(device, dtype)


if __name__ == "__main__":
    print(check("cpu", torch.float16))
