"""Models of equal blocks, and one of them compiled beside its copy that is not: what tests of such models share."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tessera


class Block(nn.Module):
    """A norm, two layers, a number that the program reads and one that it does not."""

    def __init__(self, width: int = 4, number: int = 0, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.scale, self.number = 1.0, number

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        y = self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return x + self.scale * (y if extra is None else y * extra)


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()  # a leaf is a tensor of another kind
        for block in self.blocks:
            x = block(x)
        return x


def stack(count: int = 4, **options: float) -> Stack:
    torch.manual_seed(0)
    return Stack(*(Block(number=i, **options) for i in range(count)))  # type: ignore[arg-type]


def given(*shape: int) -> Tensor:
    return torch.randn(*shape or (2, 4), generator=torch.Generator().manual_seed(1))


class Pair:
    """A model that is compiled, and its copy that is not."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.plain = model, copy.deepcopy(model)
        self.fast = tessera.jit(model, executors=["aten"], strict=True)

    def both(self, change: Callable[[nn.Module], object]) -> None:
        change(self.model)
        change(self.plain)

    def check(self, x: Tensor | None = None) -> None:
        """Results, gradients and buffers of one call are equal, and so are random numbers."""
        outs, grads = [], []
        for model, call in ((self.model, self.fast), (self.plain, self.plain)):
            model.zero_grad()
            torch.manual_seed(2)
            own = (given() if x is None else x).clone().requires_grad_()
            out = call(own)
            if out.requires_grad:
                out.square().sum().backward()
            outs.append(out.detach())
            grads.append([own.grad, *(p.grad for p in model.parameters())])
        torch.testing.assert_close(*outs)
        for mine, theirs in zip(*grads, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs)
        for mine, theirs in zip(self.model.buffers(), self.plain.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs)

    @property
    def graphs(self) -> list:
        return self.fast.__tessera__.backend.graphs

    @property
    def notes(self) -> dict[str, str]:
        return self.graphs[-1].blocks


def repeats(model: nn.Module, x: Tensor | None = None) -> int:
    """How many calls of blocks were not traced."""
    pair = Pair(model)
    pair.check(x)
    return pair.graphs[-1].repeats
