"""What stands between the caller and a compiled graph: inputs that share memory while one of them is written."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

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


def test_a_write_over_symbols_that_eager_refuses(recwarn: pytest.WarningsRecorder) -> None:
    """Its type says that it overlaps itself; TorchDynamo takes what dropout gives for a copy. Nothing is to report."""

    def write(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, False).sigmoid_() * 2

    fast = tessera.jit(write, dynamic=True)
    torch.testing.assert_close(fast(torch.ones(2, 3)), write(torch.ones(2, 3)))
    for call in (write, fast):
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            call(torch.ones(3).expand(4, 3))
    assert not [w for w in recwarn if "could not compile" in str(w.message)]


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


@pytest.mark.parametrize("order", ["eager first", "eager last", "twice in a graph", "two graphs"])
def test_running_statistics_are_written_without_counting(order: str) -> None:
    """As PyTorch's kernels do: what eager saved beside them is still what it was."""
    norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    begun = copy.deepcopy(norm.state_dict())
    fast = tessera.jit(norm, strict=True)
    both = tessera.jit(lambda x: norm(x) + norm(2 * x), strict=True)
    x = torch.randn(5, 3, dtype=torch.float64)
    two = {
        "eager first": lambda: norm(x) + fast(2 * x),
        "eager last": lambda: fast(x) + norm(2 * x),
        "twice in a graph": lambda: norm(3 * x) + both(x),
        "two graphs": lambda: fast(x) + fast(2 * x),
    }[order]

    def observed(call: Callable) -> list[torch.Tensor | int]:
        norm.load_state_dict(begun)
        norm.zero_grad()
        before = norm.running_mean._version
        call().sum().backward()
        return [
            norm.running_mean._version - before,
            norm.running_mean.clone(),
            norm.running_var.clone(),
            norm.bias.grad,
        ]  # type: ignore[list-item]

    want = observed(lambda: norm(x) + norm(2 * x)) if order != "twice in a graph" else None
    got = observed(two)
    assert got[0] == 0
    torch.testing.assert_close(got, want or observed(lambda: norm(3 * x) + norm(x) + norm(2 * x)))


def test_statistics_that_somebody_else_writes_are_counted() -> None:
    """Of an instance norm, and of a batch norm whose statistics the program scales."""
    mean, var, x = torch.zeros(3), torch.ones(3), torch.randn(2, 3, 4)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        out = F.batch_norm(x, mean, var, training=True)
        mean.mul_(0.5)
        return out

    for fn in (scaled, lambda x: F.instance_norm(x, mean, var)):
        versions = []
        for call in (fn, tessera.jit(fn, strict=True)):
            before = mean._version, var._version
            call(x)
            versions.append((mean._version > before[0], var._version > before[1]))
        assert versions[0] == versions[1]
