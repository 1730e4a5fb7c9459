"""Losses, and operators over images: rows that ranks have stay there, whatever their size, and numbers are the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from all_ranks import assert_equal, train_mesh
from steps import compiled_step, train_whole
from torch import Tensor, nn

from tessera.transforms.shard import partition


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with large tensors, on which operators are not tried."""
    monkeypatch.setattr(partition, "tried", lambda eqn: None)


def trains_where_it_is(model: nn.Module, loss, batch: list[Tensor]) -> None:
    """Data stay on their ranks, and tensor parallelism gives the same numbers."""
    _, compilation = compiled_step(model, loss, batch, {"dp": 2}, {"dp": "zero3"}, "sgd", None)
    assert not compilation.account.gathered
    want = train_whole(model, loss, [batch], "sgd", None)
    for plan in ({"dp": "zero3"}, {"tp": "tensor"}):
        assert_equal(train_mesh(model, loss, [batch], dict.fromkeys(plan, 2), plan, "sgd"), want)


class Layer(nn.Linear):
    """Rows of 3 places, 8 classes each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 8, dtype=torch.float64)


def signs(t: Tensor) -> Tensor:
    return 2 * t.round() - 1


def by_class(f):
    """Classes are the second dimension."""
    return lambda x, t: f(x.transpose(1, 2), t.transpose(1, 2))


WEIGHT = torch.linspace(0.5, 2.0, 8, dtype=torch.float64)
LOSSES = {
    "smooth l1": F.smooth_l1_loss,
    "huber": lambda x, t: F.huber_loss(x, t, reduction="sum"),
    "bce": lambda x, t: F.binary_cross_entropy(x.sigmoid(), t),
    "bce of logits": F.binary_cross_entropy_with_logits,
    "bce, weighted": lambda x, t: F.binary_cross_entropy_with_logits(x, t, pos_weight=WEIGHT),
    "log sigmoid": lambda x, t: -(F.logsigmoid(x) * t).mean(),
    "soft margin": lambda x, t: F.soft_margin_loss(x, signs(t)),
    "hinge": lambda x, t: F.hinge_embedding_loss(x, signs(t)),
    "distances": lambda x, t: (x - t).norm(dim=-1).mean(),
    "smoothed": by_class(lambda x, t: F.cross_entropy(x, t.argmax(1), label_smoothing=0.1)),
    "smoothed, weighted": by_class(
        lambda x, t: F.cross_entropy(x, t.argmax(1), weight=WEIGHT, label_smoothing=0.1, ignore_index=3)
    ),
    "shares": by_class(lambda x, t: F.cross_entropy(x, t, weight=WEIGHT, label_smoothing=0.1)),
    "ignored": by_class(lambda x, t: F.cross_entropy(x, t.argmax(1), weight=WEIGHT, ignore_index=2)),
    "summed": by_class(lambda x, t: F.nll_loss(x.log_softmax(1), t.argmax(1), reduction="sum")),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_losses(loss) -> None:
    draw = torch.Generator().manual_seed(1)
    x, t = (torch.rand(4, 3, n, dtype=torch.float64, generator=draw) for n in (4, 8))
    trains_where_it_is(Layer(), lambda model, x, t: loss(model(x), t), [x, t])


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c1, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.up, self.c2 = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.c1(x)))
        x = F.max_pool2d(x, 3, 2, 1) + F.adaptive_avg_pool2d(x, 3) + F.avg_pool2d(x, 2)
        x = self.up(x) + F.interpolate(x, scale_factor=2.0, mode="bilinear") + F.interpolate(x, scale_factor=2.0)
        return F.glu(self.c2(F.pixel_shuffle(x, 2)), 1)


def test_images() -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=draw)
    trains_where_it_is(Images().double(), lambda model, x: model(x).square().mean(), [x])


class Biased(nn.Module):
    """Attention with a table of distances, by hand: summands over heads come transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.far = nn.Linear(8, 24, bias=False), nn.Linear(8, 8), nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 2).unbind(2)
        places = torch.arange(x.shape[1])
        bias = self.far((places[:, None] - places).clamp(0, 3)).permute(2, 0, 1)
        scores = torch.einsum("bthd,bshd->bhts", q, k) + bias
        return self.out(torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2))


def test_what_an_exchange_brings_lies_as_its_type_says() -> None:
    x, axes = torch.randn(8, 4, 8, dtype=torch.float64), {"rep": 2, "dp": 2, "tp": 2}
    model, loss = Biased().double(), lambda model, x: model(x).square().mean()
    mine = train_mesh(model, loss, [[x]], axes, {"rep": "hsdp", "dp": "zero3", "tp": "tensor"}, "sgd")
    assert_equal(mine, train_whole(model, loss, [[x]], "sgd", None))
