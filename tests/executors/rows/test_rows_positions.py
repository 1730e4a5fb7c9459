"""A position for each sequence and both layouts of a cache, found in plain PyTorch programs, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tessera
from tessera.ops.rows import limits

BATCH, HEADS, GROUPS, LENGTH, HEAD = 3, 4, 2, 16, 32
EXECUTORS = ["rows", "tile", "sdpa", "aten"]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were kernels for the CPU: the operators' meaning runs in their place."""
    monkeypatch.setattr(limits, "runs", lambda device: True)
    torch._dynamo.reset()
    torch.manual_seed(0)


# --- writes: (cache, new of (batch, groups, head), positions), for a cache with its length at `dim` ---


def index_put(cache: Tensor, new: Tensor, at: Tensor, dim: int) -> None:
    if dim == 2:
        cache[torch.arange(BATCH), :, at] = new
    else:
        cache[torch.arange(BATCH), at] = new


def index_put_of_columns(cache: Tensor, new: Tensor, at: Tensor, dim: int) -> None:
    rows, heads = torch.arange(BATCH)[:, None], torch.arange(GROUPS)
    cache[(rows, heads, at[:, None]) if dim == 2 else (rows, at[:, None], heads)] = new


def scatter(cache: Tensor, new: Tensor, at: Tensor, dim: int) -> None:
    new = new.unsqueeze(dim)
    cache.scatter_(dim, at.view(-1, 1, 1, 1).expand(new.shape), new)


def one_by_one(cache: Tensor, new: Tensor, at: Tensor, dim: int) -> None:
    for b in range(BATCH):
        cache[b].index_copy_(dim - 1, at[b : b + 1], new[b].unsqueeze(dim - 1))


def index_copy(cache: Tensor, new: Tensor, at: Tensor, dim: int) -> None:
    cache.index_copy_(dim, at, new.unsqueeze(dim))


def index_put_for_all(cache: Tensor, new: Tensor, at: Tensor, dim: int) -> None:
    cache[(slice(None),) * dim + (at,)] = new.unsqueeze(dim)


EACH = [index_put, index_put_of_columns, scatter, one_by_one]
ALL = [index_copy, index_put_for_all]

# --- masks: (positions of one dimension, length) ---

MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "le": lambda at: (torch.arange(LENGTH) <= at[:, None])[:, None, None],
    "lt": lambda at: (torch.arange(LENGTH)[None] < at[:, None] + 1).view(-1, 1, 1, LENGTH),
    "ge": lambda at: at[:, None, None, None] >= torch.arange(LENGTH),
    "gt": lambda at: (at.view(-1, 1, 1, 1) + 1).gt(torch.arange(LENGTH)),
}


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dim: int, repeat: bool) -> Tensor:
    if repeat:
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=3 - dim) for x in (k, v))
    if dim == 1:
        k, v = k.transpose(1, 2), v.permute(0, 2, 1, 3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=not repeat)


def arguments(dim: int, at: list[int]) -> tuple[Tensor, ...]:
    shape = (BATCH, GROUPS, LENGTH, HEAD) if dim == 2 else (BATCH, LENGTH, GROUPS, HEAD)
    q = torch.randn(BATCH, HEADS, 1, HEAD, dtype=torch.bfloat16)
    new = [torch.randn(BATCH, GROUPS, HEAD, dtype=torch.bfloat16) for _ in range(2)]
    return (q, *new, *(torch.randn(shape, dtype=torch.bfloat16) for _ in range(2)), torch.tensor(at))


def compared(step: Callable[..., Tensor], args: tuple[Tensor, ...]) -> list[str]:
    """Runs a step compiled, and by float64 in eager PyTorch: results and caches agree. Gives the final operators."""
    exact = tuple(a.double() if a.is_floating_point() else a for a in args)
    fast = tessera.jit(step, executors=EXECUTORS, strict=True)
    with torch.no_grad():
        for one, two in zip((fast(*args), *args), (step(*exact), *exact), strict=True):
            torch.testing.assert_close(one.double(), two.double(), rtol=0.02, atol=0.02)
    (compilation,) = fast.__tessera__.compilations()
    return [str(eqn.op) for eqn in compilation.account.programs[-1].trace.equations]


def step_of(write: Callable, mask: Callable, dim: int, repeat: bool = False) -> Callable[..., Tensor]:
    def step(q: Tensor, new_k: Tensor, new_v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        write(keys, new_k, at, dim)
        write(values, new_v, at, dim)
        return attention(q, keys, values, mask(at), dim, repeat)

    return step


@pytest.mark.parametrize("dim", [2, 1])
@pytest.mark.parametrize("write", EACH, ids=lambda f: f.__name__)
def test_a_position_for_each(write: Callable, dim: int) -> None:
    operators = compared(step_of(write, MASKS["le"], dim), arguments(dim, [5, 0, LENGTH - 1]))
    assert operators.count("rows.cached_attention") == 1
    assert not [op for op in operators if "put" in op or "scatter" in op or "index" in op or "attention.default" in op]


@pytest.mark.parametrize("dim", [2, 1])
@pytest.mark.parametrize("write", ALL, ids=lambda f: f.__name__)
def test_a_position_for_all(write: Callable, dim: int) -> None:
    operators = compared(step_of(write, MASKS["le"], dim), arguments(dim, [5]))
    assert operators.count("rows.cached_attention") == 1


@pytest.mark.parametrize("repeat", [False, True], ids=["shared", "repeated"])
@pytest.mark.parametrize("dim", [2, 1])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, dim: int, repeat: bool) -> None:
    operators = compared(step_of(index_put, MASKS[mask], dim, repeat), arguments(dim, [5, 0, 9]))
    assert operators.count("rows.cached_attention") == 1
    assert not {"aten.le.Tensor", "aten.lt.Tensor", "aten.expand.default"} & set(operators)


def test_an_index_counts_from_the_end() -> None:
    """It is written there; a mask up to a negative position shows nothing of that sequence."""
    operators = compared(step_of(index_put, MASKS["le"], 2), arguments(2, [5, -1, 3]))
    assert operators.count("rows.cached_attention") == 1


# --- what is not what it seems ---


def other_positions(q: Tensor, new_k: Tensor, new_v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    index_put(keys, new_k, at, 2)
    index_put(values, new_v, at.flip(0), 2)
    return attention(q, keys, values, MASKS["le"](at), 2, False)


def other_order(q: Tensor, new_k: Tensor, new_v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    for cache, new in ((keys, new_k), (values, new_v)):
        cache[torch.arange(BATCH).flip(0), :, at] = new
    return attention(q, keys, values, MASKS["le"](at), 2, False)


def broadcast(q: Tensor, new_k: Tensor, new_v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    for cache, new in ((keys, new_k), (values, new_v)):
        cache[torch.arange(BATCH), :, at] = new[:1]
    return attention(q, keys, values, MASKS["le"](at), 2, False)


def one_left_out(q: Tensor, new_k: Tensor, new_v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    for cache, new in ((keys, new_k), (values, new_v)):
        for b in range(1, BATCH):
            cache[b].index_copy_(1, at[b : b + 1], new[b].unsqueeze(1))
    return attention(q, keys, values, MASKS["le"](at), 2, False)


def a_mask_of_its_own(q: Tensor, new_k: Tensor, new_v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """Another limit for every head."""
    index_put(keys, new_k, at, 2)
    index_put(values, new_v, at, 2)
    seen = torch.arange(LENGTH) <= at[:, None, None, None] + torch.arange(HEADS)[:, None, None]
    return attention(q, keys, values, seen, 2, False)


@pytest.mark.parametrize("step", [other_positions, other_order, broadcast, one_left_out, a_mask_of_its_own])
def test_what_is_not_what_it_seems(step: Callable) -> None:
    operators = compared(step, arguments(2, [5, 0, 9]))
    assert ("rows.cached_attention" in operators) == (step is a_mask_of_its_own)  # a mask is a mask


# --- what the program does to heads ---


@pytest.mark.parametrize("dim", [2, 1])
def test_heads_are_turned_by_angles_of_their_own(dim: int) -> None:
    """Rotary embeddings looked up for each sequence, before or after heads and tokens change places."""
    table = torch.randn(2, LENGTH, HEAD, dtype=torch.bfloat16)

    def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cosine + torch.cat((-second, first), dim=-1) * sine

    def step(q: Tensor, new_k: Tensor, new_v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        cosine, sine = table.to(q.dtype)[:, at].unsqueeze(2 if dim == 2 else 3).unbind(0)
        q, new_k = (x.reshape(BATCH, -1, HEAD) if dim == 2 else x.reshape(BATCH, 1, -1, HEAD) for x in (q, new_k))
        if dim == 1:
            cosine, sine = cosine.view(BATCH, 1, 1, HEAD), sine.view(BATCH, 1, 1, HEAD)
        q, new_k = rotate(q, cosine, sine), rotate(new_k, cosine, sine)
        q = q.unsqueeze(2) if dim == 2 else q.transpose(1, 2)
        index_put(keys, new_k.reshape(BATCH, GROUPS, HEAD), at, dim)
        index_put(values, new_v, at, dim)
        return attention(q, keys, values, MASKS["le"](at), dim, False)

    operators = compared(step, arguments(dim, [5, 0, 9]))
    assert operators.count("rows.cached_attention") == 1
    assert not {"aten.cat.default", "aten.neg.default"} & set(operators)
