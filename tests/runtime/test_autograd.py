"""The bridge to autograd: what forward saved dies with its last reader in backward, unless the graph is kept."""

from __future__ import annotations

import weakref

import pytest
import torch

from tessera.runtime.autograd import Bridge, bridge


def joined(seen: list[bool]):  # noqa: ANN201
    """x * 3 with two saved tensors; `seen` tells whether each was gone once backward had let go of it."""

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 3, x + 1, x + 2

    def backward(given: list[torch.Tensor]) -> tuple[torch.Tensor]:
        first, second, ct = given
        given.clear()
        held = [weakref.ref(first), weakref.ref(second)]
        del first
        seen.append(held[0]() is None)
        del second
        seen.append(held[1]() is None)
        return (ct * 3,)

    return bridge(forward, backward, Bridge(1, (), (0,), (0,), 1, (0, 1), ()))


@pytest.mark.parametrize("keep", [False, True])
def test_saved_tensors_die_with_their_last_reader(keep: bool) -> None:
    seen: list[bool] = []
    x = torch.ones(4, requires_grad=True)
    (y,) = joined(seen)(x)
    y.sum().backward(retain_graph=keep)
    assert seen == [not keep, not keep]
    assert torch.equal(x.grad, torch.full((4,), 3.0))
    if keep:
        y.sum().backward()
        assert seen == [False, False, True, True] and torch.equal(x.grad, torch.full((4,), 6.0))
