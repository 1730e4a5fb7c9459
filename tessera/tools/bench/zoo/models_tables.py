"""Tables and clicks: DLRM, a transformer over columns, two towers, a plain MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.tools.bench.zoo.network import Drawn


def relu_mlp(*widths: int) -> nn.Sequential:
    layers = [layer for a, b in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


# --- recommendation ---


class DLRM(nn.Module):
    """Bags of rows from many tables, numbers through an MLP, and all their products with each other."""

    def __init__(self, tables: int, rows: int, width: int, dense: int, bottom: tuple[int, ...], top: tuple[int, ...]):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = relu_mlp(dense, *bottom, width)
        pairs = (tables + 1) * tables // 2
        self.top = relu_mlp(pairs + width, *top, 1)
        below = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.row: Tensor
        self.column: Tensor
        self.register_buffer("row", below[0])
        self.register_buffer("column", below[1])

    def forward(self, dense: Tensor, ids: Tensor, clicks: Tensor) -> Tensor:
        first = self.bottom(dense)
        features = torch.stack([first, *(bag(i) for bag, i in zip(self.bags, ids.unbind(), strict=True))], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.row, self.column]
        logit = self.top(torch.cat((first, products), dim=1))[:, 0]
        return F.binary_cross_entropy_with_logits(logit.float(), clicks.float())


def dlrm(
    batch: int, tables: int, rows: int, width: int, dense: int, bag: int, bottom: tuple[int, ...], top: tuple[int, ...]
) -> Drawn:
    model = DLRM(tables, rows, width, dense, bottom, top)
    ids = torch.randint(rows, (tables, batch, bag))
    return model, (torch.randn(batch, dense), ids), (torch.randint(2, (batch,)).float(),)


class TwoTowers(nn.Module):
    """Users and items, normalised; every other item of the batch is a wrong one."""

    def __init__(self, users: int, items: int, width: int, hidden: int):
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user, self.item = relu_mlp(width, hidden, hidden, width), relu_mlp(width, hidden, hidden, width)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, user: Tensor, item: Tensor, weight: Tensor) -> Tensor:
        a, b = F.normalize(self.user(self.users(user)), dim=-1), F.normalize(self.item(self.items(item)), dim=-1)
        logits = (a @ b.t()).float() * self.scale.float().exp()
        right = torch.arange(logits.shape[0], device=logits.device)
        both = F.cross_entropy(logits, right, reduction="none") + F.cross_entropy(logits.t(), right, reduction="none")
        return (both * weight.float()).mean()


def two_towers(batch: int, users: int, items: int, width: int, hidden: int) -> Drawn:
    model = TwoTowers(users, items, width, hidden)
    return model, (torch.randint(users, (batch,)), torch.randint(items, (batch,))), (torch.rand(batch),)


# --- tables ---


class ColumnTransformer(nn.Module):
    """A token for every column, numbers and categories alike; the first one answers."""

    def __init__(self, numbers: int, categories: tuple[int, ...], width: int, depth: int, heads: int):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(numbers, width)), nn.Parameter(torch.randn(numbers, width))
        self.embeddings = nn.ModuleList(nn.Embedding(count, width) for count in categories)
        self.answer = nn.Parameter(torch.randn(1, 1, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, numbers: Tensor, categories: Tensor, wanted: Tensor) -> Tensor:
        known = numbers[..., None] * self.scale + self.shift
        named = torch.stack([e(c) for e, c in zip(self.embeddings, categories.unbind(1), strict=True)], dim=1)
        x = torch.cat((self.answer.expand(known.shape[0], -1, -1), known, named), dim=1)
        return F.mse_loss(self.head(self.layers(x)[:, 0])[:, 0].float(), wanted.float())


def column_transformer(
    batch: int, numbers: int, categories: tuple[int, ...], width: int, depth: int, heads: int
) -> Drawn:
    named = torch.stack([torch.randint(count, (batch,)) for count in categories], dim=1)
    model = ColumnTransformer(numbers, categories, width, depth, heads)
    return model, (torch.randn(batch, numbers), named), (torch.randn(batch),)


class TableMLP(nn.Module):
    """Batch norms in front, residual blocks, a few outputs."""

    def __init__(self, features: int, width: int, depth: int, classes: int):
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm1d(features), nn.Linear(features, width))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(F.relu(x)).float(), labels)


def table_mlp(batch: int, features: int, width: int, depth: int, classes: int) -> Drawn:
    return (
        TableMLP(features, width, depth, classes),
        (torch.randn(batch, features),),
        (torch.randint(classes, (batch,)),),
    )
