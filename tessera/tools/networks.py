"""Networks beside GPT and Llama that the model benchmarks measure, written the way users write them.

`ViT` and `ResNet50` take images and labels and give the mean cross-entropy, `Bert` takes token ids and gives hidden
states, `MoE` is the gated MLP of a Mixtral-like block with its experts. Weights are random; shapes never depend on
data, so that every compiler can run all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of a transformer encoder. The defaults are those of ViT-B."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int = 3072


class SelfAttention(nn.Module):
    """Every position sees every other."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.heads = config.heads
        self.q, self.k, self.v, self.out = (nn.Linear(config.width, config.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (f(x).view(batch, time, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Encoder(nn.Module):
    """One block: attention and a GELU MLP, each with its norm before (ViT) or after (BERT) the sum."""

    def __init__(self, config: EncoderConfig, norm_first: bool):
        super().__init__()
        self.norm_first = norm_first
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = SelfAttention(config)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, config.hidden), nn.GELU(), nn.Linear(config.hidden, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class ViT(nn.Module):
    """Patches, a class token, learned positions, encoder blocks, a head."""

    def __init__(self, config: EncoderConfig, image: int = 224, patch: int = 16, classes: int = 1000):
        super().__init__()
        self.patches = nn.Conv2d(3, config.width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, config.width) * 0.02)
        self.blocks = nn.ModuleList(Encoder(config, norm_first=True) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])).float(), labels)


class Bert(nn.Module):
    """Embeddings of tokens and positions, a norm, encoder blocks."""

    def __init__(self, config: EncoderConfig, vocab: int = 30522, context: int = 512):
        super().__init__()
        self.tokens = nn.Embedding(vocab, config.width)
        self.positions = nn.Embedding(context, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.blocks = nn.ModuleList(Encoder(config, norm_first=False) for _ in range(config.layers))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.norm(self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device)))
        for block in self.blocks:
            x = block(x)
        return x


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up, and the way around."""

    def __init__(self, inside: int, width: int, stride: int):
        super().__init__()
        outside = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.around = nn.Identity()
        if stride != 1 or inside != outside:
            self.around = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.around(x))


class ResNet50(nn.Module):
    """Four stages of bottlenecks; `depths` of (3, 4, 6, 3) and a width of 64 are ResNet-50."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        inside, blocks = width, []
        for i, depth in enumerate(depths):
            for j in range(depth):
                blocks.append(Bottleneck(inside, width << i, 2 if i and not j else 1))
                inside = 4 * (width << i)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.conv(images))), 3, 2, 1)
        x = self.blocks(x).mean((2, 3))
        return F.cross_entropy(self.head(x).float(), labels)


class MoE(nn.Module):
    """Every token goes to its two best experts, as far as these have room: `slack` times an even share.

    An expert's tokens stand in a queue of fixed length, so that all experts are three batched products.
    """

    def __init__(self, width: int = 4096, hidden: int = 14336, experts: int = 8, slack: float = 1.25):
        super().__init__()
        self.experts, self.slack = experts, slack
        self.router = nn.Linear(width, experts, bias=False)
        self.gate = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        room = int(self.slack * 2 * tokens.shape[0] / self.experts)
        # In float32: a rounded score would send tokens elsewhere.
        scores = F.linear(tokens.float(), self.router.weight.float()).softmax(-1)
        share, expert = scores.topk(2, dim=-1)
        share = share / share.sum(-1, keepdim=True)
        expert = expert.flatten()
        chosen = F.one_hot(expert, self.experts)
        place = (chosen.cumsum(0) * chosen).sum(-1) - 1
        nowhere = self.experts * room
        slot = torch.where(place < room, expert * room + place, nowhere)
        queues = tokens.new_zeros(nowhere + 1, tokens.shape[1]).index_copy(0, slot, tokens.repeat_interleave(2, 0))
        inside = queues[:-1].view(self.experts, room, -1)
        hidden = F.silu(torch.bmm(inside, self.gate)) * torch.bmm(inside, self.up)
        outputs = torch.bmm(hidden, self.down).flatten(0, 1)
        outputs = torch.cat((outputs, outputs.new_zeros(1, outputs.shape[1])))
        y = (outputs[slot].view(-1, 2, outputs.shape[1]) * share.to(outputs.dtype)[..., None]).sum(1)
        return F.mse_loss(y.float(), targets.flatten(0, -2).float())
