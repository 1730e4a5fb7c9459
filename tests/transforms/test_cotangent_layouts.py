"""Layouts that programs have and types must tell: what gives its argument back, cotangents in any strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from against_eager import WAYS, assert_like_eager
from torch import Tensor, nn
from torch.testing import assert_close

import tessera


def inputs() -> list:
    torch.manual_seed(0)
    return [torch.randn(4, 6, 5, 3, requires_grad=True)]


def spread(x: Tensor) -> Tensor:
    """A value that shows its elements several times."""
    return (x[:, :1] * 2).expand(4, 6, 5, 3)


PROGRAMS: dict[str, Callable] = {
    "dropout of nothing": lambda x: torch.einsum("abcd,dk->abck", F.dropout(spread(x), 0.0, True), torch.ones(3, 2)),
    "dropout gives its argument": lambda x: F.dropout(x, 0.0, True),
    "other dropouts of nothing": lambda x: (nn.AlphaDropout(0.0)(x * 2).view(-1), F.dropout2d(x * 2, 0.0)),
    "dropout of everything": lambda x: F.dropout(spread(x), 1.0, True),
    "batch_norm of transposed": lambda x: F.batch_norm((x * 2).transpose(1, 3), None, None, training=True).sin(),
    "roll in channels_last": lambda x: (
        (x.contiguous(memory_format=torch.channels_last) * 2).roll(1, 0).mT.reshape(4, -1)
    ),
    "index_fill of spread": lambda x: spread(x).mT.index_fill(0, torch.tensor([0]), 1.0).sin().reshape(-1),
    "einsum of permuted": lambda x: torch.einsum(
        "cabd,cabe->cde", x.permute(2, 0, 1, 3), x.permute(2, 0, 1, 3).flip(0)
    ),
    "an expanded cotangent": lambda x: F.avg_pool2d(x * 2, 2).permute(1, 2, 3, 0).reshape(6, -1).mean(1),
    "a transposed cotangent": lambda x: (x[:, :, 0] @ x[:, 0].mT).mT.reshape(4, -1).sum(0),
    "conjugates of a slice": lambda x: torch.fft.hfftn((x * 2)[..., :2], (3,), (3,)),
    "parts of complex numbers": lambda x: torch.view_as_real(torch.complex(x, x * 2)).transpose(0, 4).sum(1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_like_eager(name: str, way: str) -> None:
    assert_like_eager(PROGRAMS[name], inputs, **WAYS[way])


def test_strides_that_differ_from_call_to_call() -> None:
    """The second layout makes the strides symbolic; the backward program says of its cotangent what it is given."""
    fast = tessera.jit(lambda x, y: torch.select_scatter(x, y, 0, 1), strict=True)
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        x = torch.randn(3, 3, 3, 2)[..., 0].permute(order).requires_grad_()
        y = torch.randn(3, 3, 2)[..., 0].requires_grad_()
        for ct in (torch.randn(3, 3, 3), torch.randn(3, 3, 3).permute(order), torch.ones(()).expand(3, 3, 3)):
            with tessera.override(verify=True):
                got = torch.autograd.grad(fast(x, y), (x, y), ct)
            assert_close(got, torch.autograd.grad(torch.select_scatter(x, y, 0, 1), (x, y), ct))


def test_relative_attention_without_dropout() -> None:
    """As XLNet has it: positions spread over the batch go through a dropout of nothing into einsums."""

    class Relative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.r = (nn.Parameter(torch.randn(8, 2, 4)) for _ in range(2))

        def forward(self, h: Tensor) -> Tensor:
            place = F.dropout(torch.randn(10, 8)[:, None].expand(10, h.shape[1], 8), 0.0, self.training)
            q = torch.einsum("ibh,hnd->ibnd", h, self.q)
            r = torch.einsum("ibh,hnd->ibnd", place, self.r)
            return torch.einsum("ibnd,jbnd->bnij", q, r).softmax(-1).square().sum()

    torch.manual_seed(0)
    model = Relative()
    h = torch.randn(5, 3, 8)

    def gradients(fn: Callable) -> list[Tensor]:
        torch.manual_seed(1)
        return list(torch.autograd.grad(fn(h), list(model.parameters())))

    torch.testing.assert_close(gradients(tessera.jit(model, strict=True)), gradients(model))
