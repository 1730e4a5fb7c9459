"""Diffusion: a convolutional U-Net and a transformer with adaptive layer norm. Both predict the noise of an image."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.tools.bench.zoo.network import Drawn


def timestep_embedding(t: Tensor, width: int) -> Tensor:
    half = width // 2
    rates = torch.exp(-math.log(10000.0) * torch.arange(half, device=t.device, dtype=torch.float32) / half)
    angles = t.float()[:, None] * rates
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


# --- U-Net ---


class ResBlock(nn.Module):
    def __init__(self, inside: int, outside: int, embedded: int, groups: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(embedded, outside)
        self.norm2, self.conv2 = nn.GroupNorm(groups, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.around = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(t))[:, :, None, None]
        y = self.conv2(F.silu(self.norm2(y)))
        return self.around(x) + y


class SpatialAttention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, height, length = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, 3, self.heads, width // self.heads, height * length)
        q, k, v = qkv.transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(batch, width, height, length))


class Stage(nn.Module):
    """A block of convolutions, and attention where the image is small."""

    def __init__(self, inside: int, outside: int, embedded: int, groups: int, heads: int):
        super().__init__()
        self.block = ResBlock(inside, outside, embedded, groups)
        self.attention = SpatialAttention(outside, heads, groups) if heads else None

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.block(x, t)
        return x if self.attention is None else self.attention(x)


class DiffusionUNet(nn.Module):
    def __init__(self, channels: int, width: int, multiples: tuple[int, ...], blocks: int, heads: int, groups: int):
        super().__init__()
        embedded = 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, embedded), nn.SiLU(), nn.Linear(embedded, embedded))
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        kept, inside = [width], width
        for level, multiple in enumerate(multiples):
            for _ in range(blocks):
                self.down.append(Stage(inside, width * multiple, embedded, groups, heads if level else 0))
                inside = width * multiple
                kept.append(inside)
            last = level == len(multiples) - 1
            self.shrink.append(nn.Identity() if last else nn.Conv2d(inside, inside, 3, stride=2, padding=1))
            kept += [] if last else [inside]
        self.middle = Stage(inside, inside, embedded, groups, heads)
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for level, multiple in reversed(list(enumerate(multiples))):
            for _ in range(blocks + 1):
                self.up.append(Stage(inside + kept.pop(), width * multiple, embedded, groups, heads if level else 0))
                inside = width * multiple
            self.grow.append(nn.Conv2d(inside, inside, 3, padding=1) if level else nn.Identity())
        self.blocks, self.levels = blocks, len(multiples)
        self.norm, self.last = nn.GroupNorm(groups, inside), nn.Conv2d(inside, channels, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        t = self.time(timestep_embedding(time, self.width).to(x.dtype))
        x = self.first(x)
        kept = [x]
        for level in range(self.levels):
            for i in range(self.blocks):
                x = self.down[level * self.blocks + i](x, t)
                kept.append(x)
            if level < self.levels - 1:
                x = self.shrink[level](x)
                kept.append(x)
        x = self.middle(x, t)
        for level in range(self.levels):
            for i in range(self.blocks + 1):
                x = self.up[level * (self.blocks + 1) + i](torch.cat((x, kept.pop()), dim=1), t)
            if level < self.levels - 1:
                x = self.grow[level](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.last(F.silu(self.norm(x))).float(), noise.float())


def diffusion_unet(
    batch: int, side: int, channels: int, width: int, multiples: tuple[int, ...], blocks: int, heads: int, groups: int
) -> Drawn:
    model = DiffusionUNet(channels, width, multiples, blocks, heads, groups)
    x, noise = (torch.randn(batch, channels, side, side) for _ in range(2))
    return model, (x, torch.randint(1000, (batch,))), (noise,)


# --- transformer ---


class JointAttention(nn.Module):
    """Queries, keys and values in one product; queries and keys are normalised head by head."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_q, self.norm_k = nn.RMSNorm(width // heads, eps=1e-6), nn.RMSNorm(width // heads, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class AdaptiveBlock(nn.Module):
    """Scales, shifts and gates of both halves come from the condition."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attention = JointAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(c).chunk(6, dim=-1)
        x = x + gate1[:, None] * self.attention(modulate(self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiffusionTransformer(nn.Module):
    def __init__(self, side: int, patch: int, channels: int, width: int, depth: int, heads: int, classes: int):
        super().__init__()
        self.patch, self.channels = patch, channels
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.labels = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(AdaptiveBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.last = nn.Linear(width, patch * patch * channels)

    def forward(self, x: Tensor, time: Tensor, label: Tensor, noise: Tensor | None = None) -> Tensor:
        batch, _, side, _ = x.shape
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        c = self.time(timestep_embedding(time, 256).to(x.dtype)) + self.labels(label)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.condition(c).chunk(2, dim=-1)
        x = self.last(modulate(self.norm(x), shift, scale))
        count, patch = side // self.patch, self.patch
        x = x.view(batch, count, count, patch, patch, self.channels).permute(0, 5, 1, 3, 2, 4)
        x = x.reshape(batch, self.channels, side, side)
        return x if noise is None else F.mse_loss(x.float(), noise.float())


def diffusion_transformer(
    batch: int, side: int, patch: int, channels: int, width: int, depth: int, heads: int, classes: int
) -> Drawn:
    model = DiffusionTransformer(side, patch, channels, width, depth, heads, classes)
    x, noise = (torch.randn(batch, channels, side, side) for _ in range(2))
    return model, (x, torch.randint(1000, (batch,)), torch.randint(classes, (batch,))), (noise,)
