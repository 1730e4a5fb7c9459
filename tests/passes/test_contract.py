"""A multiplication and a sum that are a product become one; values, gradients and layouts stay eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tessera
from tessera.passes.patterns import contract

B, C, L, S, H, N, P = 2, 3, 16, 12, 4, 10, 8  # batch, chunks, rows, columns, heads, states, width


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


# As chunked scans write them, and as people do.
PRODUCTS: dict[str, tuple[Callable, tuple[Tensor, ...]]] = {
    "queries by keys": (
        lambda c, b: (c[:, :, :, None] * b[:, :, None]).sum(-1),
        (draw(B, C, L, H, N), draw(B, C, S, H, N)),
    ),
    "scores by values": (
        lambda m, x: (m[..., None] * x[:, :, None]).sum(3),
        (draw(B, C, L, S, H), draw(B, C, S, H, P)),
    ),
    "columns before rows": (
        lambda b, x: (b[..., None, :] * x[..., None]).sum(2),
        (draw(B, C, L, H, N), draw(B, C, L, H, P)),
    ),
    "mean": (lambda a, b: (a[:, :, None] * b).mean(1, keepdim=True) * 2, (draw(L, S), draw(S, P))),
    "expanded": (lambda a, b: (a[:, :, None].expand(L, S, P) * b).sum(-2), (draw(L, S), draw(S, P))),
    "two dimensions": (lambda a, b: (a[..., None] * b).sum((1, 2)), (draw(L, C, S), draw(C, S, P))),
    "transposed": (lambda a, b: (a.t()[:, :, None] * b.t()[None]).sum(1), (draw(S, L), draw(P, S))),
    "two dtypes": (
        lambda a, b: (a[:, :, None] * b).sum(1),
        (draw(L, S, dtype=torch.float32), draw(S, P)),
    ),
}
SUMS: dict[str, tuple[Callable, tuple[Tensor, ...]]] = {
    "no columns": (lambda a, b: (a * b).sum(1), (draw(L, S), draw(S))),
    "nothing shared": (lambda a, b: (a[:, :, None] * b).sum(1), (draw(L, S), draw(P))),
    "read twice": (lambda a, b: ((x := a[:, :, None] * b).sum(1), x.exp()), (draw(L, S), draw(S, P))),
    "integers": (lambda a, b: (a[:, :, None] * b).sum(1), (torch.arange(6).view(2, 3), torch.arange(12).view(3, 4))),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of a test pay."""
    for name, value in {"WORK": 1, "NARROW": 2, "REUSE": 0}.items():
        monkeypatch.setattr(contract, name, value)


def operators(fast: Callable) -> set[str]:
    stage = next(s for s in tessera.stages(fast) if s.name.endswith("contract"))
    return {eqn.opname for eqn in stage.trace.equations}


def compared(fn: Callable, tensors: tuple[Tensor, ...], **options: object) -> Callable:
    fast = tessera.jit(fn, strict=True, **options)
    mine, theirs = ([t.clone().requires_grad_(t.is_floating_point()) for t in tensors] for _ in range(2))
    with tessera.override(verify=True):
        got, want = fast(*mine), fn(*theirs)
    assert_close(got, want)
    pairs = [(got, want)] if isinstance(got, Tensor) else list(zip(got, want, strict=True))
    assert [g.stride() for g, _ in pairs] == [w.stride() for _, w in pairs]
    if all(w.requires_grad for _, w in pairs):
        for out in (0, 1):
            sum(pair[out].sin().sum() for pair in pairs).backward()
        assert_close([t.grad for t in mine], [t.grad for t in theirs])
    return fast


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    fast = compared(*PRODUCTS[name])
    assert "bmm" in operators(fast) and not {"sum", "mean"} & operators(fast)


@pytest.mark.parametrize("name", PRODUCTS)
def test_without_gradients(name: str) -> None:
    fn, tensors = PRODUCTS[name]
    fast = tessera.jit(fn, strict=True)
    with torch.no_grad():
        assert_close(fast(*tensors), fn(*tensors))
    assert "bmm" in operators(fast)


@pytest.mark.parametrize("name", SUMS)
def test_what_stays_a_sum(name: str) -> None:
    assert "bmm" not in operators(compared(*SUMS[name]))


def test_other_grad_modes_stay_apart() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            x = a[:, :, None] * b
        return x.sum(1) + a.sum()

    assert "bmm" not in operators(compared(fn, (draw(L, S), draw(S, P))))


def test_symbolic_sizes() -> None:
    fn, (a, b) = PRODUCTS["mean"]
    fast = tessera.jit(fn, strict=True, dynamic=True)
    for rows in (5, 9):
        assert_close(fast(a[:rows], b), fn(a[:rows], b))
    assert "bmm" in operators(fast)


def test_eager_kernels_alone_keep_what_was_written() -> None:
    fn, tensors = PRODUCTS["mean"]
    fast = compared(fn, tensors, executors=["aten"])
    assert not [s for s in tessera.stages(fast) if s.name.endswith("contract")]


def test_little_work_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "WORK", 1 << 40)
    assert "bmm" not in operators(compared(*PRODUCTS["expanded"]))
