"""Functions with a derivative of their own, and regions that are run again, over a pipeline.

What looks at other rows of the batch there is named, all else trains as one process does.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from all_ranks import assert_equal, train_mesh
from models import GPT, VOCABULARY, token_batches
from pipe_steps import pipelined_step
from steps import train_whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Product(torch.autograd.Function):
    """Gradients of weights are sums over rows."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, b: Tensor) -> Tensor:  # noqa: ANN001
        ctx.save_for_backward(x, w)
        return x @ w.t() + b

    @staticmethod
    def backward(ctx, ct: Tensor) -> tuple:  # noqa: ANN001
        x, w = ctx.saved_tensors
        first = ct @ w if ctx.needs_input_grad[0] else None
        return first, ct.flatten(0, 1).t() @ x.flatten(0, 1), ct.sum((0, 1)).to(w.dtype)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:  # noqa: ANN001
        size = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, w, size)
        return x * size * w

    @staticmethod
    def backward(ctx, ct: Tensor) -> tuple:  # noqa: ANN001
        x, w, size = ctx.saved_tensors
        y, inner = x * size, ct * w
        return size * (inner - y * (inner * y).mean(-1, keepdim=True)), (ct * y).sum((0, 1))


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.up = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.weight, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = Product.apply(self.words(ids), self.up.weight, self.up.bias)
        return Product.apply(Scaled.apply(x, self.weight), self.head.weight, self.head.bias)


def checkpointed(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The loss is made in a region that backward runs again, where not all labels count."""

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x.flatten(0, 1), labels.flatten(), ignore_index=3)

    return checkpoint(loss, model(ids), labels % 5, use_reentrant=False)


@pytest.mark.parametrize("words", [{"pp": "1f1b"}, {"dp": "zero3", "pp": "zero-bubble"}], ids=str)
def test_trains_alike(words: dict, recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model, batches = Custom().double(), token_batches(2)
    mine = train_mesh(model, checkpointed, batches, dict.fromkeys(words, 2), words)
    assert_equal(mine, train_whole(model, checkpointed, batches, "adam", None))
    assert not [str(w.message) for w in recwarn if "microbatch" in str(w.message)]


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # noqa: ANN001
        return x.clone()

    @staticmethod
    def backward(ctx, ct: Tensor) -> Tensor:  # noqa: ANN001
        return ct / ct.norm()


class Counted(Normed):
    @staticmethod
    def backward(ctx, ct: Tensor) -> Tensor:  # noqa: ANN001
        return ct * ct.shape[0]


class Shared(Normed):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # noqa: ANN001
        return x / x.shape[0]


class Frequent(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16, scale_grad_by_freq=True)


NAMED = {
    "derivative of Normed": lambda model, ids: Normed.apply(model(ids)).square().mean(),
    "derivative of Counted": lambda model, ids: Counted.apply(model(ids)).square().mean(),
    "tessera.autograd_function": lambda model, ids: Shared.apply(model(ids)).square().mean(),
    r"aten.\S+": lambda model, ids: checkpoint(
        lambda x: x / x.shape[0], model(ids), use_reentrant=False).square().mean(),
    "aten.embedding": lambda model, ids: model(ids).square().mean(),
}  # fmt: skip


@pytest.mark.parametrize("what", NAMED)
def test_what_looks_at_other_rows_is_named(what: str) -> None:
    model, batch = Frequent() if "embedding" in what else GPT(), token_batches(1)[0][:1]
    with pytest.warns(UserWarning, match=rf"over a pipeline (the )?{what}.* at \S*\.py:\d+ sees the rows of one"):
        pipelined_step(model, NAMED[what], batch, {"pp": 2}, {"pp": "1f1b"}, microbatches=2)
