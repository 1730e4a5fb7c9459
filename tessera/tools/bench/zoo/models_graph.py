"""Graphs and point clouds: message passing along edges, attention over neighbours, PointNet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.tools.bench.zoo.network import Drawn


def mlp(*widths: int) -> nn.Sequential:
    layers = [layer for a, b in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(a, b), nn.SiLU())]
    return nn.Sequential(*layers[:-1])


# --- message passing ---


class MessagePassing(nn.Module):
    """Every edge reads both its ends; every node adds up what its edges say."""

    def __init__(self, width: int):
        super().__init__()
        self.edge, self.node = mlp(3 * width, width, width), mlp(2 * width, width, width)
        self.edge_norm, self.node_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, e: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        e = e + self.edge_norm(self.edge(torch.cat((x[source], x[target], e), dim=-1)))
        heard = torch.zeros_like(x).index_add(0, target, e)
        x = x + self.node_norm(self.node(torch.cat((x, heard), dim=-1)))
        return x, e


class MeshNet(nn.Module):
    def __init__(self, features: int, width: int, depth: int):
        super().__init__()
        self.first_node, self.first_edge = mlp(features, width, width), mlp(4, width, width)
        self.blocks = nn.ModuleList(MessagePassing(width) for _ in range(depth))
        self.last = mlp(width, width, features)

    def forward(self, x: Tensor, e: Tensor, source: Tensor, target: Tensor, wanted: Tensor) -> Tensor:
        x, e = self.first_node(x), self.first_edge(e)
        for block in self.blocks:
            x, e = block(x, e, source, target)
        return F.mse_loss(self.last(x).float(), wanted.float())


def message_passing(nodes: int, edges: int, features: int, width: int, depth: int) -> Drawn:
    source, target = torch.randint(nodes, (edges,)), torch.randint(nodes, (edges,))
    x, wanted = (torch.randn(nodes, features) for _ in range(2))
    return MeshNet(features, width, depth), (x, torch.randn(edges, 4), source, target), (wanted,)


# --- graph attention ---


class GraphAttention(nn.Module):
    """A softmax over the edges that end in a node, by scatters; sums in float32."""

    def __init__(self, inside: int, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.value = nn.Linear(inside, width, bias=False)
        self.ours = nn.Parameter(torch.randn(heads, width // heads) * 0.1)
        self.theirs = nn.Parameter(torch.randn(heads, width // heads) * 0.1)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        value = self.value(x).view(x.shape[0], self.heads, -1)
        score = (value * self.theirs).sum(-1)[source] + (value * self.ours).sum(-1)[target]
        score = F.leaky_relu(score.float(), 0.2)
        index = target[:, None].expand_as(score)
        nothing = score.new_full((x.shape[0], self.heads), -1e30)
        highest = nothing.scatter_reduce(0, index, score.detach(), "amax")
        weight = (score - highest[target]).exp()
        total = torch.zeros_like(nothing).scatter_add(0, index, weight)
        share = (weight / (total[target] + 1e-9)).to(x.dtype)
        return torch.zeros_like(value).index_add(0, target, value[source] * share[..., None]).flatten(1)


class GraphAttentionNet(nn.Module):
    def __init__(self, features: int, width: int, depth: int, heads: int, classes: int):
        super().__init__()
        widths = [features] + [width] * depth
        self.layers = nn.ModuleList(GraphAttention(a, b, heads) for a, b in zip(widths, widths[1:], strict=False))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.elu(norm(layer(x, source, target)))
        return F.cross_entropy(self.head(x).float(), labels)


def graph_attention(nodes: int, edges: int, features: int, width: int, depth: int, heads: int, classes: int) -> Drawn:
    source, target = torch.randint(nodes, (edges,)), torch.randint(nodes, (edges,))
    model = GraphAttentionNet(features, width, depth, heads, classes)
    return model, (torch.randn(nodes, features), source, target), (torch.randint(classes, (nodes,)),)


# --- point clouds ---


class Alignment(nn.Module):
    """A matrix from all points, near to the identity."""

    def __init__(self, size: int, width: int):
        super().__init__()
        self.size = size
        self.points = PointLayers(size, width, 2 * width, 16 * width)
        self.matrix = nn.Sequential(nn.Linear(16 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, size * size))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.matrix(self.points(x).amax(-1))
        return flat.view(-1, self.size, self.size) + torch.eye(self.size, device=x.device, dtype=x.dtype)


class PointLayers(nn.Sequential):
    def __init__(self, *widths: int):
        layers: list[nn.Module] = []
        for a, b in zip(widths, widths[1:], strict=False):
            layers += [nn.Conv1d(a, b, 1, bias=False), nn.BatchNorm1d(b), nn.ReLU()]
        super().__init__(*layers)


class PointNet(nn.Module):
    def __init__(self, width: int, classes: int):
        super().__init__()
        self.align3, self.first = Alignment(3, width), PointLayers(3, width, width)
        self.align, self.second = Alignment(width, width), PointLayers(width, width, 2 * width, 16 * width)
        self.head = nn.Sequential(
            nn.Linear(16 * width, 8 * width, bias=False),
            nn.BatchNorm1d(8 * width),
            nn.ReLU(),
            nn.Linear(8 * width, classes),
        )

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        x = torch.bmm(self.align3(points), points)
        x = self.first(x)
        matrix = self.align(x)
        x = self.second(torch.bmm(matrix, x)).amax(-1)
        off = torch.bmm(matrix, matrix.transpose(1, 2)).float() - torch.eye(matrix.shape[1], device=x.device)
        return F.cross_entropy(self.head(x).float(), labels) + 1e-3 * off.square().sum((1, 2)).mean()


def pointnet(batch: int, points: int, width: int, classes: int) -> Drawn:
    return PointNet(width, classes), (torch.randn(batch, 3, points),), (torch.randint(classes, (batch,)),)
