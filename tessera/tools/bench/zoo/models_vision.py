"""Images: MobileNetV3 with squeeze and excitation, a U-Net that segments, RetinaNet's pyramid and heads, a DETR."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.tools.bench.zoo.network import Drawn


def conv_norm(inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside))


# --- MobileNetV3 ---


class SqueezeExcite(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * F.hardsigmoid(self.excite(F.relu(self.squeeze(scale))))


class InvertedResidual(nn.Module):
    def __init__(self, inside: int, hidden: int, outside: int, kernel: int, stride: int, squeeze: bool, hard: bool):
        super().__init__()
        act = nn.Hardswish if hard else nn.ReLU
        layers: list[nn.Module] = [conv_norm(inside, hidden, 1), act()] if hidden != inside else []
        layers += [conv_norm(hidden, hidden, kernel, stride, hidden), act()]
        layers += [SqueezeExcite(hidden)] if squeeze else []
        self.layers = nn.Sequential(*layers, conv_norm(hidden, outside, 1))
        self.skip = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.skip else self.layers(x)


# hidden, outside, kernel, stride, squeeze, hard swish: the large variant
MOBILE = (
    (16, 16, 3, 1, False, False), (64, 24, 3, 2, False, False), (72, 24, 3, 1, False, False),
    (72, 40, 5, 2, True, False), (120, 40, 5, 1, True, False), (120, 40, 5, 1, True, False),
    (240, 80, 3, 2, False, True), (200, 80, 3, 1, False, True), (184, 80, 3, 1, False, True),
    (184, 80, 3, 1, False, True), (480, 112, 3, 1, True, True), (672, 112, 3, 1, True, True),
    (672, 160, 5, 2, True, True), (960, 160, 5, 1, True, True), (960, 160, 5, 1, True, True),
)  # fmt: skip


class MobileNetV3(nn.Module):
    def __init__(self, blocks: int, classes: int):
        super().__init__()
        self.first = nn.Sequential(conv_norm(3, 16, 3, 2), nn.Hardswish())
        inside, layers = 16, []
        for hidden, outside, kernel, stride, squeeze, hard in MOBILE[:blocks]:
            layers.append(InvertedResidual(inside, hidden, outside, kernel, stride, squeeze, hard))
            inside = outside
        self.layers = nn.Sequential(*layers)
        self.last = nn.Sequential(conv_norm(inside, 6 * inside, 1), nn.Hardswish())
        self.head = nn.Sequential(nn.Linear(6 * inside, 1280), nn.Hardswish(), nn.Linear(1280, classes))

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.last(self.layers(self.first(images)))
        logits = self.head(x.mean((2, 3)))
        return logits if labels is None else F.cross_entropy(logits.float(), labels, label_smoothing=0.1)


def mobilenet_v3(batch: int, side: int, blocks: int, classes: int) -> Drawn:
    images = torch.randn(batch, 3, side, side).to(memory_format=torch.channels_last)
    model = MobileNetV3(blocks, classes).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, (images,), (torch.randint(classes, (batch,)),)


# --- U-Net ---


class TwoConvs(nn.Sequential):
    def __init__(self, inside: int, outside: int):
        super().__init__(
            conv_norm(inside, outside, 3), nn.ReLU(inplace=True), conv_norm(outside, outside, 3), nn.ReLU(inplace=True)
        )


class SegmentationUNet(nn.Module):
    def __init__(self, width: int, depth: int, classes: int):
        super().__init__()
        widths = [width << i for i in range(depth)]
        self.down = nn.ModuleList(TwoConvs(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1])
        self.up = nn.ModuleList(TwoConvs(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x, kept = images, []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        kept.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat((kept.pop(), grow(x)), dim=1))
        logits = self.head(x).float()
        entropy = F.cross_entropy(logits, labels)
        share, truth = logits.softmax(1), F.one_hot(labels, logits.shape[1]).permute(0, 3, 1, 2)
        both, either = (share * truth).sum((0, 2, 3)), (share + truth).sum((0, 2, 3))
        return entropy + 1 - ((2 * both + 1) / (either + 1)).mean()


def segmentation_unet(batch: int, side: int, width: int, depth: int, classes: int) -> Drawn:
    labels = torch.randint(classes, (batch, side, side))
    return SegmentationUNet(width, depth, classes), (torch.randn(batch, 3, side, side),), (labels,)


# --- RetinaNet ---


class RetinaNet(nn.Module):
    """A pyramid of features, and two towers that every level shares; focal loss and an L1 of boxes."""

    def __init__(self, widths: tuple[int, ...], width: int, towers: int, anchors: int, classes: int):
        super().__init__()
        stages = [nn.Sequential(conv_norm(3, widths[0], 7, 4), nn.ReLU())]
        for a, b in zip(widths, widths[1:], strict=False):
            stages.append(nn.Sequential(conv_norm(a, b, 3, 2), nn.ReLU(), conv_norm(b, b, 3), nn.ReLU()))
        self.stages = nn.ModuleList(stages)
        self.lateral = nn.ModuleList(nn.Conv2d(w, width, 1) for w in widths[1:])
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in widths[1:])

        def tower(last: int) -> nn.Sequential:
            hidden = [layer for _ in range(towers) for layer in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
            return nn.Sequential(*hidden, nn.Conv2d(width, last, 3, padding=1))

        self.scores, self.boxes, self.classes = tower(anchors * classes), tower(anchors * 4), classes

    def forward(self, images: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        x, features = images, []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        levels, above = [], None
        for lateral, smooth, x in reversed(list(zip(self.lateral, self.smooth, features[1:], strict=True))):
            x = lateral(x)
            above = x if above is None else x + F.interpolate(above, size=x.shape[-2:], mode="nearest")
            levels.append(smooth(above))
        scores = torch.cat([self._flat(self.scores(x), self.classes) for x in levels], dim=1).float()
        guessed = torch.cat([self._flat(self.boxes(x), 4) for x in levels], dim=1).float()
        truth = F.one_hot(labels, self.classes + 1)[..., 1:].float()  # class 0 is the background
        share = scores.sigmoid()
        right = share * truth + (1 - share) * (1 - truth)
        weight = 0.25 * truth + 0.75 * (1 - truth)
        entropy = F.binary_cross_entropy_with_logits(scores, truth, reduction="none")
        objects = (labels > 0)[..., None]
        count = objects.sum().clamp(min=1)
        focal = (weight * (1 - right).square() * entropy).sum() / count
        return focal + torch.where(objects, (guessed - boxes.float()).abs(), 0.0).sum() / count

    @staticmethod
    def _flat(x: Tensor, size: int) -> Tensor:
        return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, size)


def retinanet(
    batch: int, side: int, widths: tuple[int, ...], width: int, towers: int, anchors: int, classes: int
) -> Drawn:
    places = sum((side // (4 << i)) ** 2 for i in range(1, len(widths))) * anchors
    labels = torch.randint(classes + 1, (batch, places)) * (torch.rand(batch, places) < 0.02)
    model = RetinaNet(widths, width, towers, anchors, classes)
    return model, (torch.randn(batch, 3, side, side),), (labels, torch.randn(batch, places, 4))


# --- DETR ---


class Detr(nn.Module):
    """Convolutions, a transformer over their features, queries that become boxes; the matching is given."""

    def __init__(
        self, widths: tuple[int, ...], width: int, depth: int, heads: int, queries: int, classes: int, side: int
    ):
        super().__init__()
        layers = [
            layer for a, b in zip([3, *widths], widths, strict=False) for layer in (conv_norm(a, b, 3, 2), nn.ReLU())
        ]
        self.backbone = nn.Sequential(*layers, nn.Conv2d(widths[-1], width, 1))
        count = (side >> len(widths)) ** 2
        self.positions = nn.Parameter(torch.randn(1, count, width) * 0.02)
        self.queries = nn.Parameter(torch.randn(1, queries, width))
        self.transformer = nn.Transformer(width, heads, depth, depth, 4 * width, dropout=0.0, batch_first=True)
        self.labels, self.boxes = (
            nn.Linear(width, classes + 1),
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)),
        )

    def forward(self, images: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        x = self.backbone(images).flatten(2).transpose(1, 2) + self.positions
        y = self.transformer(x, self.queries.expand(x.shape[0], -1, -1))
        logits, guessed = self.labels(y).float(), self.boxes(y).float().sigmoid()
        distance = (guessed - boxes.float()).abs().sum(-1).mean()
        return (
            F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            + 5 * distance
            + 2 * (1 - overlap(guessed, boxes.float())).mean()
        )


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Generalised intersection over union of boxes as centres and sizes."""
    low = torch.maximum(a[..., :2] - a[..., 2:] / 2, b[..., :2] - b[..., 2:] / 2)
    high = torch.minimum(a[..., :2] + a[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2)
    around_low = torch.minimum(a[..., :2] - a[..., 2:] / 2, b[..., :2] - b[..., 2:] / 2)
    around_high = torch.maximum(a[..., :2] + a[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2)
    both = (high - low).clamp(min=0).prod(-1)
    either = a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - both
    around = (around_high - around_low).prod(-1)
    return both / either - (around - either) / around


def detr(
    batch: int, side: int, widths: tuple[int, ...], width: int, depth: int, heads: int, queries: int, classes: int
) -> Drawn:
    model = Detr(widths, width, depth, heads, queries, classes, side)
    boxes = torch.rand(batch, queries, 4) * 0.5 + 0.2
    return model, (torch.randn(batch, 3, side, side),), (torch.randint(classes + 1, (batch, queries)), boxes)
