"""Losses of a pipeline: sums, means and means over what counts are those of the whole batch, however labels lie; what
looks at other rows in any other way is named."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from all_ranks import assert_equal, train_mesh
from models import GPT, VOCABULARY, token_batches
from pipe_steps import pipelined_step
from steps import pretended, train_whole
from strategies import plan_of
from torch import Tensor, nn

import tessera

WEIGHT = torch.linspace(0.5, 2.0, VOCABULARY, dtype=torch.float64)


def ignored(count: int) -> list[list[Tensor]]:
    """Batches of which whole rows are ignored: in some microbatches nothing counts."""
    rows = torch.tensor([True, True, True, False])[:, None]
    return [[ids, labels.masked_fill(rows | (labels % 3 == 0), -100)] for ids, labels in token_batches(count)]


def by_class(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).transpose(1, 2), labels)


def weighted(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return 2 * F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), weight=WEIGHT) + 1.0


def masked(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    logits, mask = model(ids), labels >= 0
    each = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1) + 0.1 * logits.square().mean()


def with_buffers(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Weights of classes are a buffer of the model, and so is which words count."""
    logits = model(ids)
    counts = F.embedding(labels.clamp(min=0), model.counts[:, None])[..., 0] * (labels >= 0)
    each = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=model.weight)
    return loss + (each * counts).sum() / counts.sum()


LOSSES = {"by class": by_class, "weighted": weighted, "masked": masked, "with buffers": with_buffers}


@pytest.mark.parametrize("words", [("1f1b",), ("zero3", "1f1b"), ("tensor", "1f1b")], ids="·".join)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_means_over_what_counts(loss, words: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, batches, plan = GPT(2).double(), ignored(2), plan_of(words)
    model.register_buffer("weight", WEIGHT)
    model.register_buffer("counts", (WEIGHT > 1).double())
    mine = train_mesh(model, loss, batches, dict.fromkeys(plan, 2), plan)
    assert_equal(mine, train_whole(model, loss, batches, "adam", None))


def per_token(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(model(ids).transpose(1, 2), labels.clamp(min=0), reduction="none")
    return torch.where(labels >= 0, each, 0)


def summed(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Beside what weights alone decide; by a number that somebody else counted."""
    decay = sum(p.square().sum() for p in model.parameters())
    return per_token(model, ids, labels).sum() / 20 + 1e-3 * decay


def of_sizes(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    each = per_token(model, ids, labels) / ids.numel()
    tokens = torch.tensor(float(labels.shape[0]))
    return torch.stack(
        [each.sum(), F.cross_entropy(model(ids).mT, labels.clamp(min=0), reduction="sum") / tokens]
    ).sum()


def shares(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Each token's share of all that count, and how many those are."""
    mask = (labels >= 0).double()
    each = per_token(model, ids, labels)
    few = (each * mask).sum() / torch.count_nonzero(labels == 1).clamp(min=2)
    return (each * (mask / mask.sum())).sum() * mask.mean() + 1 - 0.5 * few


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # noqa: ANN001
        return x * 1.0

    @staticmethod
    def backward(ctx, ct: Tensor) -> Tensor:  # noqa: ANN001
        return 2 * ct


def of_last(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """One token of each row, through a function with a derivative of its own, and a part that is written in place."""
    x = Doubled.apply(model(ids))[torch.arange(ids.shape[0]), (labels >= 0).sum(1) - 1]
    with torch.no_grad():
        x *= 0.5
    return x.square().sum() / 7


def twice(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Each row beside itself backwards, in one call; neighbours, and rows behind the sequence."""
    one, other = model(torch.cat([ids, ids.flip(1)])).chunk(2)
    first, second = one.transpose(0, 1).flatten(0, 1).view(ids.shape[1], -1, 2, VOCABULARY).unbind(2)
    return (one - other).square().mean() + (first * second).mean()


@pytest.mark.parametrize("loss", [summed, of_sizes, shares, of_last, twice])
@pytest.mark.parametrize("words", [("1f1b",), pytest.param(("zero3", "1f1b"), marks=pytest.mark.sweep)], ids="·".join)
def test_sums_and_shares(loss, words: tuple[str, ...], recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    batches = [[x.repeat(3, 1) for x in batch] for batch in ignored(2)]
    model, plan = GPT(2).double(), plan_of(words)
    mine = train_mesh(model, loss, batches, dict.fromkeys(plan, 2), plan)
    assert_equal(mine, train_whole(model, loss, batches, "adam", None))
    assert not [str(w.message) for w in recwarn if "microbatch" in str(w.message)]


class Columns(nn.Module):
    """Eight columns, and bags of three words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.EmbeddingBag(VOCABULARY, 5), nn.Linear(5, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.up(self.words(ids[:, :3])).tanh())


def by_place(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Numbers for rows and for columns, made alike."""
    out = model(ids)
    each = out.sum(1) * torch.ones(ids.shape[0]) + (out * torch.ones(8)).sum(1)
    at = out[torch.arange(ids.shape[0]), labels[:, 0] % 8].sum() + out[:, torch.arange(8)].square().sum()
    return (each.sum() + at) / 7


def from_zero(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """A sum that begins as a zero like its parts, over views that one row has and several rows have not."""
    out = model(ids)
    total = out.new_zeros(())
    for part in out.split(4, 1):
        total = total + part.reshape(-1).square().sum() / ids.shape[0]
    return total + (out.view(ids.shape[0], 8).sum() + out.new_zeros(8).sum()) / 8


def checked(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """It asks about variances before it computes."""
    out = model(ids)
    return F.gaussian_nll_loss(out, labels.to(out.dtype), out.square() + 1)


@pytest.mark.parametrize("loss", [by_place, from_zero, checked])
@pytest.mark.parametrize(("rows", "microbatches"), [(2, 2), (8, 2), (16, 2)])
def test_sizes_of_a_batch_may_be_other_sizes_too(
    loss, rows: int, microbatches: int, recwarn: pytest.WarningsRecorder
) -> None:  # fmt: skip
    torch.manual_seed(0)
    model, batches = Columns().double(), token_batches(2, rows)
    mine = train_mesh(model, loss, batches, {"pp": 2}, {"pp": "1f1b"}, microbatches=microbatches)
    assert_equal(mine, train_whole(model, loss, batches, "adam", None))
    assert not [str(w.message) for w in recwarn if "microbatch" in str(w.message)]


def test_a_check_that_others_may_pass_is_named() -> None:
    def some(model: nn.Module, ids: Tensor) -> Tensor:
        assert (ids > 3).any()
        return model(ids).square().mean()

    model, batch = GPT(2), token_batches(1)[0][:1]
    with pytest.warns(UserWarning, match=r"over a pipeline aten\.any\S* at \S*test_whole_loss.py:\d+"):
        pipelined_step(model, some, batch, {"pp": 2}, {"pp": "1f1b"}, microbatches=2)


ROWS_TOGETHER = {
    "spread": lambda model, ids: model(ids).var(),
    "root of a mean": lambda model, ids: model(ids).square().mean().sqrt(),
    "product of means": lambda model, ids: model(ids).mean() * model(ids).square().mean(),
    "pairs": lambda model, ids: F.cross_entropy(
        (x := model(ids).mean(1)) @ x.T, torch.arange(x.shape[0])),
    "largest": lambda model, ids: model(ids).flatten().topk(5).values.mean(),
    "off the mean": lambda model, ids: (x := model(ids)).sub(x.mean(0)).square().mean(),
    "first row": lambda model, ids: model(ids)[0].square().mean(),
    "halves": lambda model, ids: (x := model(ids).view(2, ids.shape[0] // 2, -1))[0].sub(x[1]).square().mean(),
    "slices": lambda model, ids: (x := model(ids))[: ids.shape[0] // 2].mul(x[ids.shape[0] // 2 :]).mean(),
    "places": lambda model, ids: (model(ids).mean((1, 2)) * torch.arange(ids.shape[0])).mean(),
}  # fmt: skip


@pytest.mark.parametrize("loss", ROWS_TOGETHER.values(), ids=ROWS_TOGETHER.keys())
def test_what_sees_a_microbatch_alone_is_named(loss) -> None:
    model, batch = GPT(2), token_batches(1)[0][:1]
    with pytest.warns(UserWarning, match=r"over a pipeline aten\.\S+ .*test_whole_loss.py:\d+.* one microbatch"):
        step, _ = pipelined_step(model, loss, batch, {"pp": 2}, {"pp": "1f1b"}, microbatches=2)
    assert "sees the rows of a microbatch alone: aten." in str(tessera.explain(step))


class Centred(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y = self[0](x)
        return self[1](y - y.mean(0))


def test_a_call_says_so_too() -> None:
    model = Centred(nn.Linear(4, 4), nn.Linear(4, 4))
    with pretended({"pp": 2}) as mesh:
        fast = tessera.jit(model, mesh=mesh, plan="1f1b", microbatches=2, executors="aten")
        with pytest.warns(UserWarning, match=r"jit: over a pipeline aten.sub.\S+ at \S*test_whole_loss.py:\d+"):
            fast(torch.ones(4, 4))
        assert "sees the rows of a microbatch alone: aten.sub" in str(tessera.explain(fast))


def test_a_mean_over_all_places_is_left_alone() -> None:
    def squares(model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids).square().mean() + model(ids).abs().sum() / ids.numel()

    _, compilation = pipelined_step(GPT(2), squares, token_batches(1)[0][:1], {"pp": 2}, {"pp": "1f1b"}, microbatches=2)
    assert compilation.executable.counts is None
