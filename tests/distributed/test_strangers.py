"""Models that do what models do in the wild: each trains on a mesh as one process on the whole batch does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from all_ranks import assert_equal, train_mesh
from models import GPT, VOCABULARY, Llama, token_batches, token_loss
from steps import pretended, train_whole
from strategies import plan_of
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import tessera
from tessera.util.errors import CaptureError


class Normed(nn.Module):
    """Its matrices are made of lengths and directions, by a kernel that looks at no sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.up, self.head = weight_norm(nn.Linear(8, 16)), weight_norm(nn.Linear(16, VOCABULARY))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.relu(self.up(self.words(ids))))


class Adapted(nn.Module):
    """A frozen layer and two thin matrices, whose gradients lie transposed."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, layer.in_features) / 4)
        self.b = nn.Parameter(torch.randn(layer.out_features, 4) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (x @ self.a.T) @ self.b.T


def adapted() -> Llama:
    model = Llama(1).requires_grad_(False)
    for name in ("q", "v", "down"):
        setattr(model.blocks[0], name, Adapted(getattr(model.blocks[0], name)))
    return model


class Moving(nn.Module):
    """It binds its buffer anew in every call, and hangs a loss of its own on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        self.more = x.square().mean()
        return self.head(x - self.mean)


def with_more(model: Moving, ids: Tensor, labels: Tensor) -> Tensor:
    return token_loss(model, ids, labels) + 0.1 * model.more


def reaching_in(model: GPT, ids: Tensor, labels: Tensor) -> Tensor:
    """It calls modules of the model, multiplies by its weights, and decays them."""
    x = F.linear(model.norm(model.blocks[0](model.words(ids))), model.words.weight)
    decay = sum(p.square().sum() for p in model.parameters()) + model.places.weight.sum()
    return F.cross_entropy(x.flatten(0, 1), labels.flatten()) + 1e-3 * decay


CASES = {
    "weight norm": (Normed, token_loss),
    "adapters": (adapted, token_loss),
    "moving mean": (Moving, with_more),
    "reaching in": (lambda: GPT(1), reaching_in),
}


@pytest.mark.parametrize("words", [("zero3",), ("zero1", "tensor")], ids="·".join)
@pytest.mark.parametrize("name", CASES)
def test_trains_alike(name: str, words: tuple[str, ...]) -> None:
    make, loss = CASES[name]
    torch.manual_seed(0)
    model, batches, plan = make().double(), token_batches(2), plan_of(words)
    mine = train_mesh(model, loss, batches, dict.fromkeys(plan, 2), plan)
    assert_equal(mine, train_whole(model, loss, batches, "adam", None))


def call_once(model: nn.Module) -> None:
    with pretended({"dp": 1}) as mesh:
        tessera.jit(model, mesh=mesh, plan="ddp", executors="aten")(torch.zeros(2, 3, dtype=torch.long))


def test_nothing_of_a_trace_stays_on_the_model() -> None:
    model = Moving()
    call_once(model)
    assert not hasattr(model, "more")
    copy.deepcopy(model.mean)


def test_a_tensor_that_is_no_buffer_is_not_bound_anew() -> None:
    class Counting(Moving):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(())

        def forward(self, ids: Tensor) -> Tensor:
            self.seen = self.seen + ids.sum()
            return super().forward(ids)

    with pytest.raises(CaptureError, match=r"Counting.seen: .* expected a buffer: register_buffer"):
        call_once(Counting())


def test_a_buffer_keeps_its_size() -> None:
    class Growing(Moving):
        def forward(self, ids: Tensor) -> Tensor:
            out = super().forward(ids)
            self.mean = torch.cat([self.mean, self.mean])
            return out

    with pytest.raises(CaptureError, match=r"mean: expected .* a buffer of \[16\] .* got \[32\]"):
        call_once(Growing())
