"""What stands between the caller and a compiled graph: inputs that share memory while one of them is written."""

from __future__ import annotations

import pytest
import torch

import tessera
from tessera.runtime.call import REMEMBERED, Overlaps


def test_sharing_is_seen_whatever_was_seen_before() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + y

    fast = tessera.jit(step)
    memory = torch.arange(12.0)
    for a, b in ((0, 8), (0, 8), (0, 2), (8, 0), (2, 0)):
        mine, theirs = memory.clone(), memory.clone()
        torch.testing.assert_close(fast(mine[a : a + 4], mine[b : b + 4]), step(theirs[a : a + 4], theirs[b : b + 4]))
        torch.testing.assert_close(mine, theirs)


def test_addresses_are_remembered_only_where_nothing_meets() -> None:
    asked = Overlaps()
    memory = torch.zeros(8)
    together, apart = (memory[:4], memory[2:6]), (memory[:4], memory[4:])
    for _ in range(2):
        assert asked(together, (0,)) and not asked(apart, (0,))
    assert len(asked.apart) == 1
    for _ in range(2 * REMEMBERED):
        assert not asked((torch.zeros(3), torch.zeros(4), 5), (0,))
    assert len(asked.apart) <= REMEMBERED


def test_an_expanded_input_is_written_as_in_eager() -> None:
    def fill(x: torch.Tensor) -> torch.Tensor:
        x.fill_(3)
        return x.sum() * 2

    fast, memory = tessera.jit(fill, strict=True), torch.zeros(1, 8)
    assert fast(memory.expand(4, 8)) == 4 * 8 * 3 * 2
    assert memory.eq(3).all()


def test_windows_are_written_as_in_eager() -> None:
    """What they hold then depends on the order in which elements are written."""

    def negate(x: torch.Tensor) -> torch.Tensor:
        x.neg_()
        return x * 2

    fast, mine, theirs = tessera.jit(negate, strict=True), torch.arange(6.0), torch.arange(6.0)
    for _ in range(2):
        torch.testing.assert_close(fast(mine.unfold(0, 3, 1)), negate(theirs.unfold(0, 3, 1)))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
def test_a_view_under_no_grad_of_a_leaf_that_is_a_view(frontend: str) -> None:
    """Its base requires no gradients, so neither does the view. A view of a leaf with memory of its own does."""

    def double(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            view = x[...]
        return view * 2

    def write(x: torch.Tensor) -> None:
        with torch.no_grad():
            view = x[...]
        view[..., 0] = view[..., 1]

    fast, fast_write = (tessera.jit(fn, frontend=frontend, strict=True) for fn in (double, write))
    own, shown = torch.ones(4, 2).requires_grad_(), torch.ones(4, 4)[:, ::2].requires_grad_()
    for x in (own, shown, own):
        assert fast(x).requires_grad is double(x).requires_grad is (x is own)
    mine, theirs = (torch.arange(16.0).view(4, 4)[:, ::2].requires_grad_() for _ in range(2))
    fast_write(mine)
    write(theirs)
    assert mine.is_leaf and torch.equal(mine, theirs)
    with pytest.raises(RuntimeError, match="in-?place"):
        fast_write(own)
