"""Sequences without softmax attention, or with more than it: linear attention, recurrence, convolution, a Conformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tessera.tools.bench.zoo.network import Drawn


def tokens(batch: int, time: int, vocab: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(vocab, (batch, time + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# --- gated linear attention ---


class GatedLinearAttention(nn.Module):
    """A state per head that decays by a gate of each token; inside a chunk the sums are products of matrices."""

    def __init__(self, width: int, heads: int, chunk: int):
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.qkv, self.decay = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, heads)
        self.gate, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(width // heads, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        chunks, size = time // self.chunk, width // self.heads
        qkv = self.qkv(x).view(batch, chunks, self.chunk, 3, self.heads, size)
        q, k, v = qkv.permute(3, 0, 4, 1, 2, 5)  # batch, heads, chunks, chunk, size
        logs = F.logsigmoid(self.decay(x).float()) / 16
        total = logs.view(batch, chunks, self.chunk, self.heads).permute(0, 3, 1, 2).cumsum(-1)
        between = (total[..., :, None] - total[..., None, :]).tril()
        weights = (q @ k.transpose(-1, -2)) * size**-0.5 * between.exp().tril().to(q.dtype)
        inside = weights @ v
        kept = k * (total[..., -1:] - total).exp().to(k.dtype)[..., None]
        added = kept.transpose(-1, -2) @ v
        scaled = q * total.exp().to(q.dtype)[..., None] * size**-0.5
        state, before = torch.zeros_like(added[:, :, 0]), []
        for i in range(chunks):
            before.append(state)
            state = state * total[:, :, i, -1].exp().to(q.dtype)[..., None, None] + added[:, :, i]
        y = self.norm(inside + scaled @ torch.stack(before, dim=2))
        y = y.permute(0, 2, 3, 1, 4).reshape(batch, time, width)
        return self.out(y * F.silu(self.gate(x)))


class LinearAttentionModel(nn.Module):
    def __init__(self, vocab: int, width: int, depth: int, heads: int, chunk: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.mixers = nn.ModuleList(GatedLinearAttention(width, heads, chunk) for _ in range(depth))
        self.norms1 = nn.ModuleList(nn.RMSNorm(width, eps=1e-5) for _ in range(depth))
        self.norms2 = nn.ModuleList(nn.RMSNorm(width, eps=1e-5) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids)
        for mix, norm1, norm2, up, down in zip(self.mixers, self.norms1, self.norms2, self.up, self.down, strict=True):
            x = x + mix(norm1(x))
            x = x + down(F.relu(up(norm2(x))).square())
        return next_token_loss(self.head(self.norm(x)), targets)


def linear_attention(batch: int, time: int, vocab: int, width: int, depth: int, heads: int, chunk: int) -> Drawn:
    ids, targets = tokens(batch, time, vocab)
    return LinearAttentionModel(vocab, width, depth, heads, chunk), (ids,), (targets,)


# --- recurrent ---


class LSTMModel(nn.Module):
    def __init__(self, vocab: int, width: int, depth: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        y, _ = self.lstm(self.tokens(ids))
        return next_token_loss(self.head(y), targets)


def lstm(batch: int, time: int, vocab: int, width: int, depth: int) -> Drawn:
    ids, targets = tokens(batch, time, vocab)
    return LSTMModel(vocab, width, depth), (ids,), (targets,)


class GRUForecaster(nn.Module):
    """A cell that is called step by step, as where each step's input depends on the last step's output."""

    def __init__(self, features: int, width: int):
        super().__init__()
        self.cell, self.out, self.width = nn.GRUCell(2 * features, width), nn.Linear(width, features), width

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        state, guess = x.new_zeros(x.shape[0], self.width), torch.zeros_like(x[:, 0])
        guesses = []
        for now in x.unbind(1):
            state = self.cell(torch.cat((now, guess), dim=-1), state)
            guess = now + self.out(state)
            guesses.append(guess)
        return F.smooth_l1_loss(torch.stack(guesses, dim=1).float(), targets.float())


def gru_cell(batch: int, time: int, features: int, width: int) -> Drawn:
    x = torch.randn(batch, time + 1, features)
    return GRUForecaster(features, width), (x[:, :-1].contiguous(),), (x[:, 1:].contiguous(),)


# --- temporal convolution ---


class TemporalBlock(nn.Module):
    """Causal dilated convolutions whose weights are normalised, and the way around."""

    def __init__(self, width: int, kernel: int, dilation: int):
        super().__init__()
        self.padding = (kernel - 1) * dilation
        self.conv1 = weight_norm(nn.Conv1d(width, width, kernel, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(width, width, kernel, dilation=dilation))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv1(F.pad(x, (self.padding, 0))))
        y = F.relu(self.conv2(F.pad(y, (self.padding, 0))))
        return F.relu(x + y)


class TemporalConvNet(nn.Module):
    def __init__(self, features: int, width: int, depth: int, kernel: int):
        super().__init__()
        self.first = nn.Conv1d(features, width, 1)
        self.blocks = nn.Sequential(*(TemporalBlock(width, kernel, 2**i) for i in range(depth)))
        self.last = nn.Conv1d(width, features, 1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.l1_loss(self.last(self.blocks(self.first(x))).float(), targets.float())


def temporal_conv(batch: int, length: int, features: int, width: int, depth: int, kernel: int) -> Drawn:
    x = torch.randn(batch, features, length + 1)
    return TemporalConvNet(features, width, depth, kernel), (x[..., :-1].contiguous(),), (x[..., 1:].contiguous(),)


# --- Conformer ---


class FeedForward(nn.Sequential):
    def __init__(self, width: int):
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))


class ConformerConvolution(nn.Module):
    def __init__(self, width: int, kernel: int):
        super().__init__()
        self.norm, self.inward = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.batch_norm, self.outward = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.inward(self.norm(x).transpose(1, 2)), dim=1)
        y = F.silu(self.batch_norm(self.depthwise(y)))
        return self.outward(y).transpose(1, 2)


class ConformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, kernel: int):
        super().__init__()
        self.first, self.second = FeedForward(width), FeedForward(width)
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, batch_first=True)
        self.convolution, self.last = ConformerConvolution(width, kernel), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.first(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.convolution(x)
        return self.last(x + 0.5 * self.second(x))


class Conformer(nn.Module):
    """A spectrum at a quarter of its length, blocks, and a label for every frame."""

    def __init__(self, bins: int, width: int, depth: int, heads: int, kernel: int, labels: int):
        super().__init__()
        self.shorten = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.first = nn.Linear(width * (bins // 4), width)
        self.blocks = nn.ModuleList(ConformerBlock(width, heads, kernel) for _ in range(depth))
        self.head = nn.Linear(width, labels)

    def forward(self, spectrum: Tensor, targets: Tensor) -> Tensor:
        x = self.shorten(spectrum[:, None])
        x = self.first(x.permute(0, 2, 1, 3).flatten(2))
        for block in self.blocks:
            x = block(x)
        return next_token_loss(self.head(x), targets)


def conformer(
    batch: int, length: int, bins: int, width: int, depth: int, heads: int, kernel: int, labels: int
) -> Drawn:
    model = Conformer(bins, width, depth, heads, kernel, labels)
    return model, (torch.randn(batch, length, bins),), (torch.randint(labels, (batch, length // 4)),)
