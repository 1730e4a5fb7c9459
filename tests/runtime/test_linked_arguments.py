"""Arguments that a graph writes: hooks and gradients by them, after the call, are those of what they then hold."""

from __future__ import annotations

import pytest
import torch

import tessera
from tessera.store.program import COUNTS
from tests.runtime.test_linked import assert_same
from tests.runtime.test_linked_views import WAYS, retained

# --- programs write x, state or both: results are made of what they hold then, or held before ---


def doubled(x, state):
    x.mul_(2)
    return (x * 3).exp(), x.sum()


def alone(x, state):
    x.mul_(2)
    return ((x * 3).exp(),)


def a_view_made_before(x, state):
    first = x[0]
    x.mul_(2)
    return first, x.exp(), (first * 3).sum()


def through_a_view(x, state):
    first = x[0]
    first.mul_(2)
    return first, first.exp(), x.cos()


def through_a_view_not_given(x, state):
    first = x[0]
    first.mul_(2)
    state.diagonal().copy_(first)
    return first.exp(), x.cos() * state


def written_again(x, state):
    x.mul_(2)
    before = x.sin()
    x.add_(1)
    return before, x.exp()


def made_of_a_result(x, state):
    h = x.sin()
    x.add_(h)
    return h, (x * h).sum(), h.exp()


def in_a_row(x, state):
    a = x.sin()
    x.mul_(2)
    b = (x + a).exp()
    return a, b, b.cos() + x


def equal_to_a_result(x, state):
    x.mul_(2)
    y = x.clone()
    return y, y.exp() + x


def into_a_state(x, state):
    state.mul_(0.5).add_(x)
    return state.exp(), (state * x).sum()


def into_two(x, state):
    state.add_(x)
    x.mul_(state)
    return state.exp(), x.sin() * state


def under_a_mask(x, state):
    x[x > 0.8] = 0
    return (x + 1).log(), x.exp()


def hidden(x, state):
    with torch.no_grad():
        x.mul_(2)
    return x.exp(), x.sum()


PROGRAMS = [
    doubled, alone, a_view_made_before, through_a_view, through_a_view_not_given, written_again, made_of_a_result,
    in_a_row, equal_to_a_result, into_a_state, into_two, under_a_mask, hidden,
]  # fmt: skip


def ran(fn, way) -> tuple:
    leaf = torch.linspace(0.1, 1.7, 9, dtype=torch.float64).view(3, 3).requires_grad_()
    x, state = leaf * 1, torch.ones(3, 3, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    x.register_hook(lambda g: seen.append(g.clone()))  # of what it held before
    out = (*fn(x, state), x, state)
    got = way(out, leaf)
    return [y.detach() for y in out], got, leaf.grad, seen


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda fn: fn.__name__)
def test_gradients_by_written_arguments(program) -> None:
    compiled = tessera.jit(program, strict=True)
    for way in WAYS:
        try:
            want = ran(program, way)
        except RuntimeError as error:  # something was written that eager's graph reads
            assert "modified by an inplace operation" in str(error)
            continue
        assert_same(ran(compiled, way), want)


def test_the_written_one_is_kept_on_disk(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.setitem(COUNTS, "loaded", 0)
    with tessera.override(program_cache=True):
        for _ in range(2):
            torch._dynamo.reset()
            assert_same(ran(tessera.jit(into_two), retained), ran(into_two, retained))
    assert COUNTS["loaded"] == 1
