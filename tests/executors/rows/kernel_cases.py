"""Every kernel against what its operator means, on `device`. Prints how many agreed.

Run as a program with TRITON_INTERPRET=1, the kernels run as Python on the CPU; `test_rows_kernels` does that, and calls
`check` itself on a GPU. With the argument `all` every form of attention is tried with every shape, otherwise with one.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

import tessera
from tessera.ops.quantized import quantized
from tessera.ops.rows import limits
from tessera.ops.rows import operators as meaning
from tessera.ops.rows.kernels import attention, linear

KINDS = ("", "int8", "int4", "fp8")
FORMS = ("norm", "gate", "residual", "bias")


def crossed(shapes: tuple, forms: Iterable, every: bool) -> list[tuple]:
    """All pairs, or one of each form, with one shape after the other."""
    pairs = itertools.product(enumerate(shapes), enumerate(forms))
    return [(shape, form) for (i, shape), (j, form) in pairs if every or j % len(shapes) == i]


def assert_agree(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    error = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert error <= tolerance, f"relative error {error:.4f}"


def linears(device: str, dtype: torch.dtype) -> int:
    count = 0
    forms = [
        *((1 + 2 * ((i + j) % 2), kind, form) for i, kind in enumerate(KINDS) for j, form in enumerate(FORMS)),
        *itertools.product((1, 3), ("",), ("tanh",)),
        *itertools.product((8, 11), ("",), ("norm", "residual")),
    ]
    k = 384
    for rows, kind, form in forms:
        sizes = {"norm": (20, 9, 16), "gate": (20, 20), "tanh": (20, 20), "residual": (20,), "bias": (9, 20)}[form]
        x = torch.randn(rows, 1, k, device=device, dtype=dtype)
        full = [torch.randn(n, k, device=device, dtype=dtype) / k**0.5 for n in sizes]
        stored = [quantized(w, kind) for w in full] if kind else [(w, None) for w in full]
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
        for found, wanted in zip(linear.rows_linear(*args), meaning.rows_linear(*args), strict=True):
            assert_agree(found, wanted, 2e-2)
        count += 1
    return count


def attentions(device: str, dtype: torch.dtype, every: bool) -> int:
    count = 0
    for (batch, heads, groups, length, head), form in crossed(
        ((1, 8, 2, 100, 64), (2, 4, 4, 130, 32)), ("position", "bool", "float", "all", "normed", "turned apart"), every
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
        found, wanted = attention.decode_attention(*args), meaning.decode_attention(*args)
        assert found.shape == q.shape
        assert_agree(found, wanted, 2e-2)
        caches = [torch.zeros_like(k) for _ in range(2)]
        attention.cache_write(caches[0], new, position, 2, *how)
        meaning.cache_write(caches[1], new, position, 2, *how)
        assert_agree(caches[0], caches[1], 1e-2)
        count += 1
    return count


def cached(device: str, dtype: torch.dtype, every: bool) -> int:
    """Attention that writes: what stood in the cache where the new row goes, or after it, is never looked at."""
    count = 0
    for (batch, heads, groups, length, head), (form, at) in crossed(
        ((1, 8, 2, 140, 64), (2, 4, 4, 40, 32), (2, 4, 1, 40, 128)),
        (("position", 0), ("position", 39), ("bool", 25), ("bool", 39), ("float", 25)),
        every,
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
        found, wanted = attention.cached_attention(q, *caches, *rest), meaning.cached_attention(q, *others, *rest)
        assert_agree(found, wanted, 2e-2)
        for one, two in zip(caches, others, strict=True):
            assert not one[:, :, at].isnan().any()
            assert_agree(one.nan_to_num(), two, 1e-2)
        count += 1
    return count


def each_its_own(device: str, dtype: torch.dtype, every: bool) -> int:
    """A position for each sequence and both layouts, against float64; what a cache holds after a position is no number.

    Positions stand two apart in memory. One counts from the end: that sequence writes there and is shown nothing.
    """
    count = 0
    forms = [(form, 1 + (i + j) % 2) for i, form in enumerate(("position", "bool", "all")) for j in range(2)]
    for (batch, heads, groups, length, head), (form, dim) in crossed(
        ((3, 4, 2, 140, 32), (2, 8, 1, 70, 64)), forms, every
    ):
        make = {"device": device, "dtype": dtype}
        where = [length - 1, -2 if form == "position" else 69, 0][:batch]
        at = torch.tensor([where, where], device=device, dtype=torch.int32 if dim == 1 else torch.int64).T[:, 0]
        q, new_k, new_v = (torch.randn(batch, 1, n * head, **make) for n in (heads, groups, groups))
        shape = (batch, groups, length, head) if dim == 2 else (batch, length, groups, head)
        caches = [torch.randn(shape, **make) for _ in range(3)]
        seen = [cache if dim == 2 else cache.transpose(1, 2) for cache in caches]
        mask = torch.rand(batch, 1, 1, length, device=device) > 0.5 if form == "bool" else None
        for b, (n, cache) in itertools.product(range(batch), enumerate(seen)):
            hidden = form == "position" and n < 2
            cache[b, :, where[b] : length if hidden and where[b] >= 0 else where[b] + 1] = float("nan")
        prepare = (torch.randn(head, **make), 1e-5, 1.0, *(torch.randn(batch, head, **make) for _ in range(2)))
        rest = (new_k, new_v, at, form == "position", mask, *prepare, *prepare, head**-0.5)
        exact = [cache.double().nan_to_num() for cache in seen]
        found = attention.cached_attention(q, *seen[:2], *rest)
        wanted = meaning.cached_attention(q.double(), *exact[:2], *(_double(x) for x in rest))
        assert_agree(found, wanted, 2e-2)
        attention.cache_write(caches[2], new_k, at, dim, *prepare)
        meaning.cache_write(exact[2], new_k.double(), at, 2, *(_double(x) for x in prepare))
        for one, two in zip(seen, exact, strict=True):
            assert not any(one[b, :, where[b]].isnan().any() for b in range(batch))
            assert_agree(one.nan_to_num(), two, 1e-2)
        count += 1
    return count


def programs(device: str, dtype: torch.dtype) -> int:
    """The program that is generated launches the kernels: the next token of each sequence, caches in both layouts."""

    def step(x: Tensor, weight: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        new = F.linear(x, weight).view(2, 2, 64)
        rows = torch.arange(2, device=x.device)
        keys[rows, :, at] = new
        values[rows, at] = new
        seen = (torch.arange(40, device=x.device) <= at[:, None])[:, None, None]
        return F.scaled_dot_product_attention(new[:, :, None], keys, values.transpose(1, 2), attn_mask=seen)

    make = {"device": device, "dtype": dtype}
    args = [torch.randn(2, 128, **make), torch.randn(128, 128, **make) / 128**0.5]
    args += [torch.randn(2, 2, 40, 64, **make), torch.randn(2, 40, 2, 64, **make), torch.tensor([7, 39], device=device)]
    exact = [_double(x) for x in args]
    fast = tessera.jit(step, executors=["rows", "sdpa", "aten"], strict=True)
    with torch.no_grad():
        found, wanted = fast(*args), step(*exact)
    assert_agree(found, wanted, 2e-2)
    for one, two in zip(args[2:4], exact[2:4], strict=True):
        assert_agree(one, two, 1e-2)
    (program,) = fast.__tessera__.compilations()[0].account.programs
    launched = [eqn.op.fn for eqn in program.trace.equations if str(eqn.op).startswith("rows.")]
    assert launched == [linear.rows_linear, attention.cached_attention]
    return 1


def _double(x: object) -> object:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def check(device: str, dtype: torch.dtype, every: bool) -> int:
    torch.manual_seed(0)
    count = linears(device, dtype) + programs(device, dtype)
    return count + sum(kind(device, dtype, every) for kind in (attentions, cached, each_its_own))


if __name__ == "__main__":
    limits.runs = lambda device: True
    print(check("cpu", torch.float16, every="all" in sys.argv))
