"""Reads and writes at indices and under masks, where any of tensor, index and value may carry the batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch.testing import assert_close

import tessera as t
from tessera.util.config import config

SIZE = 3
_G = torch.Generator().manual_seed(0)
X = torch.randn(SIZE, 4, 5, 6, generator=_G)
NUMBERS = torch.tensor([2, -1, 0])
PAIRS = torch.tensor([[0, 3], [2, 1], [-3, 0]])
MASK = torch.rand(SIZE, 4, 5, generator=_G) > 0.5
J = torch.tensor([1, 3])


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.func does not take over."""
    monkeypatch.setattr(config, "strict", True)


def loop(f: Callable, args: tuple, dims: tuple) -> torch.Tensor:
    rows = [[a if d is None else a.select(d, b).clone() for a, d in zip(args, dims, strict=True)] for b in range(SIZE)]
    return torch.stack([f(*row) for row in rows])


def check(f: Callable, args: tuple, dims: tuple) -> None:
    assert_close(t.vmap(f, dims)(*args), loop(f, args, dims))


def on_a_copy(write: Callable) -> Callable:
    def f(x: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        write(x, *args)
        return x

    return f


def mapped(x: torch.Tensor, *rest: torch.Tensor) -> list[tuple[tuple, tuple]]:
    """Every choice of which arguments carry the batch, x at two places."""
    cases = []
    for flags in product((0, None), repeat=1 + len(rest)):
        if any(d == 0 for d in flags):
            cases.append((tuple(a if d == 0 else a[0] for a, d in zip((x, *rest), flags, strict=True)), flags))
    last = x.movedim(0, -1).contiguous()
    return [*cases, ((last, *rest), (-1, *[0] * len(rest)))]


READS = {
    "x[i]": lambda x, i: x[i],
    "x[:, i]": lambda x, i: x[:, i],
    "x[..., i]": lambda x, i: x[..., i],
    "x[i, None]": lambda x, i: x[i, None],
    "x[i, :, i]": lambda x, i: x[i, :, i],
    "x[i, 1]": lambda x, i: x[i, 1],
    "x[i, :, j]": lambda x, i: x[i, :, J],
    "x[j, i]": lambda x, i: x[J, i],
    "x[j, :, i]": lambda x, i: x[J, :, i],
    "x[:, j, i]": lambda x, i: x[:, J, i],
}


@pytest.mark.parametrize("indices", [NUMBERS, PAIRS], ids=["numbers", "pairs"])
@pytest.mark.parametrize("name", READS)
def test_reads(name: str, indices: torch.Tensor) -> None:
    for args, dims in mapped(X, indices):
        check(READS[name], args, dims)


def test_indices_of_two_dimensions() -> None:
    for f in (lambda x, i: x[:, i.view(2, 1), J], lambda x, i: x[i.view(2, 1), :, J]):
        for args, dims in mapped(X, PAIRS):
            check(f, args, dims)


WRITES = {
    "x[i].add_": lambda x, i, v: x[i].add_(v),
    "x[i] *= v": lambda x, i, v: x.__setitem__(i, x[i] * v),
    "x[i] = v": lambda x, i, v: x.__setitem__(i, v),
    "x[:, i] = v": lambda x, i, v: x.__setitem__((slice(None), i), v),
    "x[..., i] = v": lambda x, i, v: x.__setitem__((..., i), v),
    "x[i][1:] = v": lambda x, i, v: x[i][1:].copy_(v),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_at_a_number_reach_the_tensor(name: str) -> None:
    for args, dims in mapped(X, NUMBERS, torch.tensor([1.0, 2.0, 3.0])):
        check(on_a_copy(WRITES[name]), args, dims)


PUTS = {
    "first": lambda i: [i],
    "second": lambda i: [None, i],
    "apart": lambda i: [i, None, J],
    "beside": lambda i: [None, J, i],
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", PUTS)
def test_index_put(name: str, accumulate: bool) -> None:
    indices = PUTS[name]

    def f(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.index_put(x, indices(i), v, accumulate)

    shape = torch.ops.aten.index.Tensor(X[0], indices(PAIRS[0])).shape
    for k in range(len(shape) + 1):  # values of fewer dimensions broadcast
        values = torch.randn(SIZE, *shape[k:], generator=torch.Generator().manual_seed(k))
        for args, dims in mapped(X, PAIRS, values):
            check(f, args, dims)


UNDER_MASKS = {
    "x[m] = v": lambda x, m, v: x.__setitem__(m, v),
    "x[row] = v": lambda x, m, v: x.__setitem__(m[:, 0], v),
    "x[:, m] = v": lambda x, m, v: x.__setitem__((slice(None), m[0]), v),
    "masked_fill": lambda x, m, v: x.masked_fill_(m[..., None], v.flatten()[0]),
    "accumulate": lambda x, m, v: torch.ops.aten.index_put_(x, [m], v, True),
    "a mask and a number": lambda x, m, v: x.__setitem__((m, 2), v.flatten()[0]),
}


@pytest.mark.parametrize("name", UNDER_MASKS)
def test_writes_under_masks(name: str) -> None:
    for shape in ((), (6,), (1, 1)):
        values = torch.randn(SIZE, *shape, generator=torch.Generator().manual_seed(1))
        for args, dims in mapped(X, MASK, values):
            check(on_a_copy(UNDER_MASKS[name]), args, dims)


@pytest.mark.parametrize("name", ["x[m] = v", "x[:, m] = v", "accumulate", "a mask and a number"])
def test_gradients_of_what_is_written_under_masks(name: str) -> None:
    f = on_a_copy(UNDER_MASKS[name])
    values = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1))

    def grad(lib: object) -> Callable:
        return lib.grad(lambda v, x, m: (f(x, m, v) ** 2).sum())  # type: ignore[attr-defined]

    for args, dims in mapped(X, MASK, values)[:4]:
        want = loop(lambda x, m, v: grad(torch.func)(v, x, m), args, dims)
        assert_close(t.vmap(lambda x, m, v: grad(t)(v, x, m), dims)(*args), want)


def test_a_value_for_every_place_of_a_mask() -> None:
    mask = torch.tensor([[True, False, True, False], [False, True, True, False], [True, True, False, False]])
    values = torch.randn(SIZE, 2, 5, 6, generator=torch.Generator().manual_seed(2))
    for args, dims in mapped(X, mask, values):
        check(on_a_copy(lambda x, m, v: x.__setitem__(m, v)), args, dims)


def test_a_picked_place_is_differentiated() -> None:
    x = X[:, 0, 0]
    want = torch.zeros_like(x)
    want[torch.arange(SIZE), NUMBERS] = 1
    assert_close(t.vmap(t.grad(lambda a, i: a[i]))(x, NUMBERS), want)


def test_nested_maps_index_by_both() -> None:
    table, rows, columns = X[0, :, :, 0], torch.tensor([0, 2]), torch.tensor([1, 4, -1])
    f = t.vmap(t.vmap(lambda i, j: table[i, j], (None, 0)), (0, None))
    assert_close(f(rows, columns), table[rows][:, columns])
