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


def assert_agree(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    error = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert error <= tolerance, f"relative error {error:.4f}"


def linears(device: str, dtype: torch.dtype) -> int:
    count = 0
    forms = [
        *itertools.product((1, 3), ("", "int8", "int4", "fp8"), ("norm", "gate", "residual", "bias")),
        *itertools.product((1, 3), ("",), ("tanh",)),
        *itertools.product((8, 11), ("",), ("norm", "residual")),
    ]
    k = 384
    for rows, kind, form in forms:
        sizes = {"norm": (20, 9, 16), "gate": (20, 20), "tanh": (20, 20), "residual": (20,), "bias": (9, 20)}[form]
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
            1.0 if form == "gate" else 0.0,
            torch.randn(rows, 1, 20, device=device, dtype=dtype) if form == "residual" else None,
            {"gate": "silu", "tanh": "gelu_tanh"}.get(form, ""),
            kind,
        )
        for found, wanted in zip(decode.rows_linear(*args), meaning.rows_linear(*args), strict=True):
            assert_agree(found, wanted, 2e-2)
        count += 1
    return count


def attentions(device: str, dtype: torch.dtype) -> int:
    count = 0
    for (batch, heads, groups, length, head), form in itertools.product(
        ((1, 8, 2, 100, 64), (2, 4, 4, 130, 32)), ("position", "bool", "float", "all", "normed", "turned apart")
    ):
        q = torch.randn(batch, 1, heads, head, device=device, dtype=dtype).transpose(1, 2)
        k, v = (torch.randn(batch, groups, length, head, device=device, dtype=dtype) for _ in range(2))
        position = torch.tensor([70], device=device)
        mask = {
            "bool": torch.rand(batch, 1, 1, length, device=device) > 0.5,
            "float": torch.randn(1, 1, 1, length, device=device, dtype=dtype),
        }.get(form)
        new = torch.randn(batch, 1, groups, head, device=device, dtype=dtype).transpose(1, 2)
        if form == "normed":  # as rows
            q, new = q.reshape(batch, 1, heads * head), new.reshape(batch, groups * head)
        norm = torch.randn(head, device=device, dtype=dtype) if form == "normed" else None
        angles = (batch, 1, head) if form == "turned apart" else (1, head)
        cosine, sine = (torch.randn(angles, device=device, dtype=dtype) for _ in range(2))
        how = (norm, 1e-5, 1.0, *((None, None) if form == "all" else (cosine, sine)))
        args = (q, k, v, position if form == "position" else None, mask, *how, head**-0.5)
        found, wanted = decode.decode_attention(*args), meaning.decode_attention(*args)
        assert found.shape == q.shape
        assert_agree(found, wanted, 2e-2)
        caches = [torch.zeros_like(k) for _ in range(2)]
        decode.cache_write(caches[0], new, position, *how)
        meaning.cache_write(caches[1], new, position, *how)
        assert_agree(caches[0], caches[1], 1e-2)
        count += 1
    return count


def cached(device: str, dtype: torch.dtype) -> int:
    """Attention that writes: what stood in the cache where the new row goes, or after it, is never looked at."""
    count = 0
    for (batch, heads, groups, length, head), (form, at) in itertools.product(
        ((1, 8, 2, 140, 64), (2, 4, 4, 40, 32), (2, 4, 1, 40, 128)),
        (("position", 0), ("position", 39), ("bool", 25), ("bool", 39), ("float", 25)),
    ):
        make = {"device": device, "dtype": dtype}
        q, new_k, new_v = (torch.randn(batch, 1, n * head, **make) for n in (heads, groups, groups))
        caches = [torch.randn(batch, groups, length, head, **make) for _ in range(2)]
        mask = {
            "bool": torch.rand(batch, 1, 1, length, device=device) > 0.5,
            "float": torch.randn(1, 1, 1, length, **make),
        }.get(form)
        if form == "bool":  # the new row is seen by all, by some, as the last
            mask[..., at] = torch.tensor([at != 25, True], device=device)[:batch, None, None]
            mask[..., at + 1 :] &= at != 39
        for cache in caches:
            cache[:, :, at : None if form == "position" else at + 1] = float("nan")
        norm, cosine, sine = torch.randn(head, **make), torch.randn(1, head, **make), torch.randn(1, head, **make)
        turn = (1e-5, 1.0, cosine, sine)
        rest = (new_k, new_v, torch.tensor([at], device=device), form == "position", mask)
        rest = (*rest, norm, *turn, None if form == "bool" else norm, *turn, head**-0.5)
        others = [cache.nan_to_num() for cache in caches]
        found, wanted = decode.cached_attention(q, *caches, *rest), meaning.cached_attention(q, *others, *rest)
        assert_agree(found, wanted, 2e-2)
        for one, two in zip(caches, others, strict=True):
            assert not one[:, :, at].isnan().any()
            assert_agree(one.nan_to_num(), two, 1e-2)
        count += 1
    return count


def check(device: str, dtype: torch.dtype) -> int:
    torch.manual_seed(0)
    return linears(device, dtype) + attentions(device, dtype) + cached(device, dtype)


if __name__ == "__main__":
    print(check("cpu", torch.float16))
