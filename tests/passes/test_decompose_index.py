"""Writes at indices as gathers: the same numbers, and only where something is filled for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from programs import trace_of

from tessera.ir.interp import run
from tessera.ir.trace import Trace
from tessera.ir.verify import verify
from tessera.passes.decompose.apply import decompose


def apart(fn: Callable, *args: object) -> tuple[Trace, Trace]:
    """The trace, and what it becomes where kernels hold everything but writes at indices."""
    trace = trace_of(fn, *args)
    after = decompose(trace, lambda eqn: "index_copy" not in str(eqn.op))
    verify(after)
    return trace, after


def operators(trace: Trace) -> list[str]:
    return [eqn.op._opname for eqn in trace.equations]  # type: ignore[union-attr]


ROWS, PLACES = torch.randn(5, 80), torch.tensor([7, 0, 3, 8, 1])


@pytest.mark.parametrize(
    ("fn", "source"),
    [
        (lambda x, i: x.new_zeros(9, 80).index_copy(0, i, x), ROWS),
        (lambda x, i: x.new_full((9, 80), 2.5).index_copy(-2, i, x * 2), ROWS),
        (lambda x, i: torch.ones(80, 9, dtype=x.dtype).index_copy(1, i, x.t()), ROWS),
        (lambda x, i: torch.zeros(4, 9, 20, dtype=x.dtype).index_copy(1, i, x.view(5, 4, 20).transpose(0, 1)), ROWS),
        (lambda x, i: x.new_zeros(9, 80).index_copy(0, i, x), (ROWS * 100).to(torch.int32)),
    ],
    ids=["rows", "filled", "columns", "middle", "integers"],
)
def test_slices_copied_are_gathered(fn: Callable, source: torch.Tensor) -> None:
    before, after = apart(fn, source, PLACES)
    assert operators(after).count("index_copy") == 1 and "index_select" in operators(after)
    (small,) = (eqn for eqn in after.equations if eqn.op._opname == "index_copy")  # type: ignore[union-attr]
    assert small.out.shape == (9,)
    for got, want in zip(run(after, source, PLACES), run(before, source, PLACES), strict=True):
        assert torch.equal(got, want)


def test_of_two_slices_for_one_place_one_stays_whole() -> None:
    _, after = apart(lambda x, i: x.new_zeros(3, 80).index_copy(0, i, x), ROWS, PLACES)
    (got,) = run(after, ROWS, torch.tensor([1, 1, 2, 1, 2]))
    assert torch.equal(got[0], torch.zeros(80))
    assert any(torch.equal(got[1], ROWS[k]) for k in (0, 1, 3)) and any(torch.equal(got[2], ROWS[k]) for k in (2, 4))


def test_what_was_there_is_written_in_place() -> None:
    before, after = apart(lambda x, i, cache: cache.index_copy(0, i, x), ROWS, PLACES, torch.randn(9, 80))
    assert after is before
    before, after = apart(lambda x, i: x.new_zeros(9, 80).exp().index_copy(0, i, x), ROWS, PLACES)
    assert after is before


def test_short_slices_stay() -> None:
    before, after = apart(lambda x, i: x.new_zeros(9, 8).index_copy(0, i, x[:, :8]), ROWS, PLACES)
    assert after is before


def test_a_cpu_keeps_the_check_of_classes() -> None:
    before = trace_of(lambda i: F.one_hot(i, 10), PLACES)
    assert decompose(before, lambda eqn: "one_hot" not in str(eqn.op)) is before
