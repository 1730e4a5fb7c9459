"""Densities, fields and equations: two normalising flows, a physics-informed network, a radiance field, a VAE."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from tessera.tools.bench.zoo.network import Drawn

HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


# --- normalising flows ---


class AffineCoupling(nn.Module):
    """Half of the features scales and shifts the other half."""

    def __init__(self, size: int, width: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(size // 2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, size)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, dim=-1)
        scale, shift = self.net(a).chunk(2, dim=-1)
        scale = torch.tanh(scale)
        return torch.cat((b * scale.exp() + shift, a), dim=-1), scale.float().sum(-1)


class RealNVP(nn.Module):
    def __init__(self, size: int, width: int, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(AffineCoupling(size, width) for _ in range(depth))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        logs = torch.zeros(x.shape[0], device=x.device)
        for layer in self.layers:
            x, log = layer(x)
            logs = logs + log
        likelihood = (-0.5 * x.float().square() - HALF_LOG_TAU).sum(-1) + logs
        return -(likelihood * weight.float()).mean()


def realnvp(batch: int, size: int, width: int, depth: int) -> Drawn:
    return RealNVP(size, width, depth), (torch.randn(batch, size),), (torch.rand(batch),)


class GlowStep(nn.Module):
    """Scales per channel, an invertible product over channels, a coupling by convolutions."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.shift, self.scale = (nn.Parameter(torch.randn(1, channels, 1, 1) * 0.1) for _ in range(2))
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0])
        self.net = nn.Sequential(
            nn.Conv2d(channels // 2, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
            nn.ReLU(),
            nn.Conv2d(width, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pixels = x.shape[2] * x.shape[3]
        x = (x + self.shift) * self.scale.exp()
        x = F.conv2d(x, self.mix[:, :, None, None])
        log = pixels * (self.scale.float().sum() + torch.linalg.slogdet(self.mix.float())[1])
        a, b = x.chunk(2, dim=1)
        scale, shift = self.net(a).chunk(2, dim=1)
        scale = torch.sigmoid(scale + 2)
        return torch.cat((a, b * scale + shift), dim=1), log + scale.float().log().sum((1, 2, 3))


class Glow(nn.Module):
    def __init__(self, levels: int, depth: int, width: int):
        super().__init__()
        self.levels = nn.ModuleList()
        channels = 3
        for _ in range(levels):
            channels *= 4
            self.levels.append(nn.ModuleList(GlowStep(channels, width) for _ in range(depth)))
            channels //= 2

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        size, total = x[0].numel(), torch.zeros(x.shape[0], device=x.device)
        for i, steps in enumerate(self.levels):
            x = F.pixel_unshuffle(x, 2)
            for step in steps:  # type: ignore[attr-defined]
                x, log = step(x)
                total = total + log
            if i < len(self.levels) - 1:
                x, out = x.chunk(2, dim=1)
                total = total - 0.5 * out.float().square().sum((1, 2, 3))
        total = total - 0.5 * x.float().square().sum((1, 2, 3))
        return -(total * weight.float()).mean() / size


def glow(batch: int, side: int, levels: int, depth: int, width: int) -> Drawn:
    return Glow(levels, depth, width), (torch.randn(batch, 3, side, side),), (torch.rand(batch),)


# --- a network that solves an equation ---


class Burgers(nn.Module):
    """u(t, x) with u_t + u u_x = v u_xx: derivatives of the network by its inputs, then of those by its weights."""

    def __init__(self, width: int, depth: int, viscosity: float = 0.01):
        super().__init__()
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), *hidden, nn.Linear(width, 1))
        self.viscosity = viscosity

    def u(self, t: Tensor, x: Tensor) -> Tensor:
        return self.net(torch.stack((t, x)))[0]

    def residual(self, t: Tensor, x: Tensor) -> Tensor:
        u_t, u_x = grad(self.u, argnums=(0, 1))(t, x)
        u_xx = grad(grad(self.u, argnums=1), argnums=1)(t, x)
        return u_t + self.u(t, x) * u_x - self.viscosity * u_xx

    def forward(self, t: Tensor, x: Tensor, start: Tensor) -> Tensor:
        inside = vmap(self.residual)(t, x)
        first = vmap(self.u)(torch.zeros_like(start), start)
        return inside.float().square().mean() + (first.float() + torch.sin(math.pi * start.float())).square().mean()


def physics(batch: int, width: int, depth: int) -> Drawn:
    t, x, start = torch.rand(batch), torch.rand(batch) * 2 - 1, torch.rand(batch // 8) * 2 - 1
    return Burgers(width, depth), (t, x), (start,)


# --- a radiance field ---


class RadianceField(nn.Module):
    """Colour and density at points along rays, composed from front to back."""

    def __init__(self, width: int, depth: int, bands: int):
        super().__init__()
        self.bands = bands
        size = 3 + 6 * bands
        self.first = nn.Linear(size, width)
        self.layers = nn.ModuleList(nn.Linear(width + (size if i == depth // 2 else 0), width) for i in range(depth))
        self.skip, self.density, self.colour = depth // 2, nn.Linear(width, 1), nn.Linear(width + 3, 3)

    def forward(self, origin: Tensor, direction: Tensor, depth: Tensor, seen: Tensor) -> Tensor:
        points = origin[:, None] + direction[:, None] * depth[..., None]
        angles = points[..., None] * 2.0 ** torch.arange(self.bands, device=points.device, dtype=points.dtype)
        encoded = torch.cat((points, angles.sin().flatten(-2), angles.cos().flatten(-2)), dim=-1)
        x = F.relu(self.first(encoded))
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(torch.cat((x, encoded), dim=-1) if i == self.skip else x))
        density = F.softplus(self.density(x)[..., 0].float())
        colour = self.colour(torch.cat((x, direction[:, None].expand(-1, x.shape[1], -1)), dim=-1)).sigmoid().float()
        gaps = torch.diff(depth.float(), append=depth[:, -1:].float() + 0.1)
        opaque = 1 - torch.exp(-density * gaps)
        through = torch.cumprod(1 - opaque + 1e-6, dim=-1)
        before = torch.cat((torch.ones_like(through[:, :1]), through[:, :-1]), dim=-1)
        return F.mse_loss(((opaque * before)[..., None] * colour).sum(1), seen.float())


def radiance_field(batch: int, points: int, width: int, depth: int, bands: int) -> Drawn:
    direction = F.normalize(torch.randn(batch, 3), dim=-1)
    along = torch.linspace(0.1, 2.0, points).expand(batch, -1).contiguous()
    return RadianceField(width, depth, bands), (torch.randn(batch, 3), direction, along), (torch.rand(batch, 3),)


# --- a variational autoencoder ---


class VAE(nn.Module):
    def __init__(self, width: int, latent: int, side: int):
        super().__init__()
        self.inward = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.SiLU(), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.SiLU(), nn.Flatten()
        )
        flat = 2 * width * (side // 4) ** 2
        self.code, self.start = nn.Linear(flat, 2 * latent), nn.Linear(latent, flat)
        self.outward = nn.Sequential(
            nn.Unflatten(1, (2 * width, side // 4, side // 4)),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        mean, log = self.code(self.inward(images)).chunk(2, dim=-1)
        drawn = mean + noise * torch.exp(0.5 * log)
        error = F.binary_cross_entropy_with_logits(self.outward(self.start(drawn)).float(), images.float())
        mean, log = mean.float(), log.float()
        return error - 5e-4 * (1 + log - mean.square() - log.exp()).sum(-1).mean()


def vae(batch: int, side: int, width: int, latent: int) -> Drawn:
    return VAE(width, latent, side), (torch.rand(batch, 3, side, side),), (torch.randn(batch, latent),)
