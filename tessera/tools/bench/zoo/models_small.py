"""Small models, where the host decides: a digit classifier, a policy with its critic, a robot's transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.tools.bench.zoo.network import Drawn


class LeNet(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))))
        x = self.fc3(x)
        return x if labels is None else F.nll_loss(F.log_softmax(x.float(), dim=1), labels)


def lenet(batch: int, classes: int) -> Drawn:
    return LeNet(classes), (torch.randn(batch, 1, 28, 28),), (torch.randint(classes, (batch,)),)


class ActorCritic(nn.Module):
    """Proximal policy optimisation: a Gaussian policy, its clipped loss, a value and an entropy."""

    def __init__(self, seen: int, actions: int, width: int):
        super().__init__()

        def net(last: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(seen, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, last)
            )

        self.policy, self.value, self.spread = net(actions), net(1), nn.Parameter(torch.full((actions,), -0.5))

    def forward(self, seen: Tensor, action: Tensor, before: Tensor, advantage: Tensor, gain: Tensor) -> Tensor:
        mean, spread = self.policy(seen).float(), self.spread.float().exp()
        log = (-0.5 * ((action.float() - mean) / spread).square() - self.spread.float() - 0.919).sum(-1)
        ratio = (log - before.float()).exp()
        advantage = (advantage.float() - advantage.float().mean()) / (advantage.float().std() + 1e-8)
        gained = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        value = F.mse_loss(self.value(seen)[:, 0].float(), gain.float())
        return -gained + 0.5 * value - 0.01 * self.spread.float().sum()


def actor_critic(batch: int, seen: int, actions: int, width: int) -> Drawn:
    model = ActorCritic(seen, actions, width)
    action = torch.randn(batch, actions)
    return (
        model,
        (torch.randn(batch, seen), action),
        (torch.randn(batch) * 0.1 - actions, torch.randn(batch), torch.randn(batch)),
    )


class RobotTransformer(nn.Module):
    """A few camera and joint tokens in, a chunk of actions out, one observation at a time."""

    def __init__(self, features: int, width: int, depth: int, heads: int, actions: int, ahead: int):
        super().__init__()
        self.first, self.positions = nn.Linear(features, width), nn.Parameter(torch.randn(1, 64, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head, self.ahead = nn.Linear(width, actions * ahead), ahead

    def forward(self, seen: Tensor, wanted: Tensor | None = None) -> Tensor:
        x = self.first(seen) + self.positions[:, : seen.shape[1]]
        out = self.head(self.layers(x).mean(1)).view(seen.shape[0], self.ahead, -1)
        return out if wanted is None else F.l1_loss(out.float(), wanted.float())


def robot_transformer(
    batch: int, time: int, features: int, width: int, depth: int, heads: int, actions: int, ahead: int
) -> Drawn:
    model = RobotTransformer(features, width, depth, heads, actions, ahead)
    return model, (torch.randn(batch, time, features),), (torch.randn(batch, ahead, actions),)
