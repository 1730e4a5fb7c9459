"""Rows that a mask selects, in a program of all ranks: losses over `x[mask]` are those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from all_ranks import assert_equal, train_mesh
from models import VOCABULARY, token_batches
from steps import pretended, train_whole
from strategies import plan_of
from torch import Tensor, nn

import tessera
from tessera.util.errors import CaptureError


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 16), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.up(self.words(ids)).tanh()


def labelled(model: Words, ids: Tensor, labels: Tensor) -> Tensor:
    """As masked language models do: only what is asked for goes through the head; the mask is written three times."""
    logits = model.head(model(ids)[labels > 20])
    own = logits.log_softmax(-1).gather(1, labels[labels > 20][:, None])
    return F.cross_entropy(logits, labels[labels > 20], label_smoothing=0.1) - own.squeeze(1).mean()


def counted(model: Words, ids: Tensor, labels: Tensor) -> Tensor:
    rows, others = model(ids)[ids > 9], model(ids)[ids <= 5, :4]
    return rows.square().sum() / rows.shape[0] + others.exp().sum() / max(others.numel(), 1) + others.mean(0).sum()


def edges(model: Words, ids: Tensor, labels: Tensor) -> Tensor:
    """What the mask leaves out has no logarithm, and lengths of zero."""
    x = model(ids)
    logs = torch.masked_select(x, x > 0).log().sum() + (-x[x < 0]).sqrt().sum()
    return logs / 50 + (x - x.detach())[ids > 9].add(1).norm(dim=-1).mean()


def pairs(model: Words, ids: Tensor, labels: Tensor) -> Tensor:
    x, mask = model(ids), ids > 9
    kept, other = F.layer_norm(x[mask], (16,)), torch.zeros_like(x)[mask]
    ones = kept.new_ones(kept.shape[0])
    chance = F.binary_cross_entropy_with_logits(x[mask][:, 0], (labels[mask] > 20).to(x.dtype))
    return (
        F.mse_loss(kept, other)
        + F.smooth_l1_loss(x[mask], other, reduction="sum") / 7
        + (kept[:, 0] * ones).sum()
        + chance
    )


def whole_rows(model: Words, ids: Tensor, labels: Tensor) -> Tensor:
    """Sequences that are selected, none at all, and a part of a matrix that nobody's data decide."""
    x = model(ids)
    square = x.flatten(0, 1).T @ x.flatten(0, 1) / ids.numel()
    off = square[~torch.eye(16, dtype=torch.bool)].sum()
    return x[(ids > 40).any(1)].mean() + x[ids > 99].sum() + off


def among_others(model: Words, ids: Tensor, labels: Tensor) -> Tensor:
    """Rows that are selected among rows that were; what the first mask left out counts for neither."""
    rows = model(ids)[ids > 9]
    kept, unlike = rows[rows[:, 0] > 0], torch.masked_select(rows, rows < 0.1)
    return kept.square().sum() / kept.shape[0] + rows[labels[ids > 9] > 20].mean() + unlike.sum() / 50


def written_back(model: Words, ids: Tensor, labels: Tensor) -> Tensor:
    x, mask = model(ids), ids > 9
    out, other = torch.zeros_like(x), x.clone()
    out[mask] = x[mask] * 2
    other[mask, :4] = x[mask][:, :1].exp()
    other[~mask] += 1
    rows = x[mask].clone()
    rows[rows[:, 0] > 0] *= 5
    scattered = x.masked_scatter(x > 0, x[x > 0] * 3)
    return out.square().mean() + other.sin().mean() + rows.mean() + scattered.mean()


def behind_others(model: Words, ids: Tensor, labels: Tensor) -> Tensor:
    x, some, few = model(ids), ids > 9, ids <= 5
    chosen = torch.cat([labels[some], labels[few], labels[some]])
    plain = torch.cat([x[some], x.new_ones(3, 16) * x.mean()])
    beside = torch.cat([x[some], x[some] * 2], 1)
    loss = F.cross_entropy(model.head(torch.cat([x[some], x[few], x[some]])), chosen)
    return loss + plain.square().mean() + plain.sum() / len(plain) + beside.mean()


def in_other_shapes(model: Words, ids: Tensor, labels: Tensor) -> Tensor:
    rows = model(ids)[ids > 9]
    heads, flat, halves = rows.view(-1, 4, 4), rows.reshape(-1), rows.view(-1, 8)
    each = heads.softmax(-1).square().sum() / heads.shape[0] + flat.square().mean()
    return each + flat.view(-1, 16).exp().mean() + halves.amax(1).mean() + halves.amin(0).sum()


def extremes(model: Words, ids: Tensor, labels: Tensor) -> Tensor:
    rows = model(ids)[ids > 9]
    values = rows.amax(0) + rows.amin() + rows.max() + rows.max(0).values + rows.logsumexp(0) + rows.norm(dim=0)
    spread = rows.std(0) + rows.var() + torch.std_mean(rows, 0)[1] + rows.norm()
    places = rows.argmax(0) + rows.min(0).indices + rows[:, 0].argmin() + (rows > -5).all()
    each = rows.softmax(0).square() + rows.cumsum(0)
    return (values + spread + places + (rows.abs() + 0.9).prod(0)).sum() + each.mean()


def in_order(model: Words, ids: Tensor, labels: Tensor) -> Tensor:
    """Sorted, the largest, the middle; and what else stands at such places. Equal rows have no order of their own."""
    x, mask = model(ids), ids > 9
    rows, kept = x[mask], ids[mask]
    up, down = rows.sort(0), rows[:, 0].sort(descending=True)
    weights = torch.linspace(0, 1, 16, dtype=rows.dtype)
    values = (up.values * weights).square().cumsum(0).mean() + (rows[down.indices] * weights).cumsum(0).mean()
    best, least = rows.topk(5, 0), rows.topk(3, 0, largest=False)
    hardest = rows.square().sum(1).topk(4).indices
    values += best.values.sin().sum() + least.values.cos().sum() + (rows[hardest] * kept[hardest][:, None]).mean()
    values += rows.gather(0, best.indices).sum() + up.indices[:, 0].float().mean()
    middle, third = rows.median(0), rows.kthvalue(3, 0, keepdim=True)
    values += middle.values.sum() + rows.gather(0, middle.indices[None]).mean() + rows.gather(0, third.indices).mean()
    values += rows.median() + rows[:, 1].nanmedian() + third.values.exp().sum()
    return values + rows.sort(1).values[:, :3].sum()


def columns(model: Words, ids: Tensor, labels: Tensor) -> Tensor:
    """Behind other dimensions, where one mask holds for all rows."""
    x = model(ids)
    where = (ids > 20).any(0)
    some = x[:, where]
    features = x[..., x.mean((0, 1)) > 0]
    both = x[:, where, :4].square().mean() + x[0, where].sum() + x[:2, where].amax((0, 1)).sum()
    out = x * 2
    out[:, where] = some.exp()
    return some.square().mean() + features.sum() / features.shape[-1] + both + out.mean() + some.median(1)[0].sum()


CASES = [
    *((loss, ("zero3", "tensor")) for loss in (labelled, counted, edges, pairs, whole_rows)),
    *((loss, ("zero3", "tensor")) for loss in (among_others, behind_others, in_other_shapes, extremes)),
    *((loss, ("zero3", "tensor")) for loss in (in_order, columns)),
    *((written_back, words) for words in (("zero3", "tensor"), ("zero1", "1f1b"))),
    *((loss, ("zero1", "1f1b")) for loss in (labelled, counted, pairs)),
]


@pytest.mark.parametrize(("loss", "words"), CASES, ids=lambda x: "·".join(x) if isinstance(x, tuple) else x.__name__)
def test_losses_over_selected_rows(loss, words: tuple[str, ...], recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model, batches, plan = Words().double(), token_batches(2, 8), plan_of(words)
    mine = train_mesh(model, loss, batches, dict.fromkeys(plan, 2), plan)
    assert_equal(mine, train_whole(model, loss, batches, "adam", None))
    assert not [str(w.message) for w in recwarn if "microbatch" in str(w.message)]


def branches(model: Words, ids: Tensor) -> Tensor:
    rows = model(ids)[ids > 9]
    return rows.mean() if rows.numel() > 0 else model(ids).sum()


def other_mask(model: Words, ids: Tensor) -> Tensor:
    x, out = model(ids)[..., 0], torch.zeros_like(ids, dtype=torch.float)
    return out.masked_scatter(ids > 2, x[ids > 9]).sum() + x[ids > 2].sum()


REFUSED = {
    "as many": (branches, "does something else where more rows, or fewer"),
    "few": (lambda model, ids: model(ids)[ids > 9].mean() * (2 if (ids[ids > 9]).shape[0] > 5 else 3), "of a number"),
    "few beside rows": (lambda model, ids: (model(ids)[ids > 9] * (2 if len(ids[ids > 9]) > 5 else 3)).sum(), "number"),
    "at least": (lambda model, ids: (model(ids)[ids > 9] / max(len(ids[ids > 9]), 1)).sum(), "of a number"),
    "commonest": (lambda model, ids: model(ids)[ids > 9].mode(0).values.sum(), "looks at rows of a mask together"),
    "half": (lambda model, ids: model(ids)[ids > 9].topk(len(ids[ids > 9]) // 2, 0).values.sum(), "of a number"),
    "another mask": (other_mask, "does something else|rows of a mask"),
    "first": (lambda model, ids: model(ids)[ids > 9][0].sum(), "looks at rows of a mask together"),
    "turned": (lambda model, ids: (model(ids)[ids > 9].flip(0) * model(ids)[ids > 9]).sum(), "together"),
    "joined": (lambda model, ids: model(ids)[ids > 9].T.reshape(-1).square().sum(), "joins rows of a mask"),
    "places": (lambda model, ids: (torch.arange((ids[ids > 9]).shape[0]) * 2.0).sum(), "as many as a mask selects"),
    "a tensor": (lambda model, ids: model(ids).sum() / torch.tensor(1.0 * len(ids[ids > 9])), "a tensor of"),
    "more": (lambda model, ids: model(ids).sum() / (len(ids[ids > 9]) + 1), "of a number that depends"),
    "a result": (None, "how many rows there are is a result"),
}  # fmt: skip


def largest(model: Words, ids: Tensor) -> Tensor:
    return model(ids)[ids > 60].amax(0).sum()


def test_the_largest_of_no_rows_is_an_error() -> None:
    ids = token_batches(1)[0][0]
    with (
        pretended({"dp": 1}) as mesh,
        pytest.raises(IndexError, match="test_selected_rows.py.*the mask selects no row"),
    ):
        model = Words()
        by = torch.optim.SGD(model.parameters())
        tessera.train_step(model, largest, by, mesh=mesh, plan="ddp", executors="aten")(ids)


class Selected(Words):
    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)[ids > 9]
        return rows, rows.shape[0]


@pytest.mark.parametrize(("loss", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_written_over_all_rows_is_refused(loss, says: str) -> None:
    ids = token_batches(1)[0][0]
    with (
        pretended({"dp": 1}) as mesh,
        pytest.raises(CaptureError, match=rf"test_selected_rows.py:\d+.*{says}.*expected"),
    ):
        if loss is None:
            tessera.jit(Selected(), mesh=mesh, plan="ddp", executors="aten")(ids)
        else:
            model = Words()
            by = torch.optim.SGD(model.parameters())
            tessera.train_step(model, loss, by, mesh=mesh, plan="ddp", executors="aten")(ids)
