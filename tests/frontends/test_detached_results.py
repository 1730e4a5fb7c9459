"""A tensor and its detached self, written with gradients on: two results with histories of their own, in one memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tessera


def copied(x: Tensor) -> tuple[Tensor, ...]:
    base = x * 3
    detached = base.detach()
    detached.copy_(base)
    return base, detached[None]


def multiplied(x: Tensor) -> tuple[Tensor, ...]:
    base = x * 2
    detached = base.detach()
    detached.mul_(x)
    return detached, base


def written_through_a_view(x: Tensor) -> tuple[Tensor, ...]:
    base = x * 2
    detached = base.detach()
    detached.mul_(x)
    row = detached[0]
    row.add_(x[1])
    return base, detached, row


def part(x: Tensor) -> tuple[Tensor, ...]:
    base = x * 2
    row = base[1]
    detached = row.detach()
    detached.mul_(row + 1)
    return base, detached, row


def window(x: Tensor) -> tuple[Tensor, ...]:
    base = x * 2
    shown = base.as_strided((2,), (1,), 1)
    detached = shown[0].detach()
    detached[...] = shown[0]
    return detached, shown


@pytest.mark.parametrize("program", [copied, multiplied, written_through_a_view, part, window])
@pytest.mark.parametrize("grad", [False, True])
def test_they_share_memory_as_in_eager(program: Callable, grad: bool) -> None:
    def seen(run: Callable) -> tuple:
        x = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_(grad)
        results = run(x)
        before = [y.detach().clone() for y in results]
        sums = [y.sum() for y in results if y.requires_grad]
        grads = [torch.autograd.grad(s, x, retain_graph=True)[0] for s in sums]
        shared = [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a in results for b in results]
        with torch.no_grad():
            results[0].mul_(5)
        return shared, [y.requires_grad for y in results], before, grads, [y.detach() for y in results]

    ours, eager = seen(tessera.jit(program)), seen(program)
    assert ours[:2] == eager[:2]
    for got, want in zip(ours[2:], eager[2:], strict=True):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
