"""Maps against PyTorch's own numbers: whatever views do, each place names the right element."""

from __future__ import annotations

import random

import pytest
import torch

from tessera.spatial.importer.moves import repeated, viewed
from tessera.spatial.importer.numbers import from_numbers, numbers
from tessera.spatial.maps import Home, Map, concatenated, padded, whole
from tessera.spatial.rectangles import rectangles

HOMES = [Home("a", torch.float32, 6, 8, 0), Home("b", torch.float32, 4, 6, 48)]


def start(chance: random.Random) -> tuple[Map, torch.Tensor]:
    home, shape = chance.choice([(HOMES[0], (6, 8)), (HOMES[0], (2, 3, 8)), (HOMES[1], (4, 6)), (HOMES[1], (2, 2, 6))])
    return whole(home, shape), torch.arange(home.base, home.base + home.size).reshape(shape)


def step(chance: random.Random, m: Map, t: torch.Tensor) -> tuple[Map, torch.Tensor]:
    d = chance.randrange(t.ndim)
    n = t.shape[d]
    match chance.randrange(8):
        case 0:
            dims = chance.sample(range(t.ndim), t.ndim)
            return m.permute(*dims), t.permute(dims)
        case 1:
            left, by = chance.randrange(n), chance.choice([1, 1, 2])
            see = lambda x: x[(slice(None),) * d + (slice(left, n, by),)]  # noqa: E731
            return viewed(m, see)[0], see(t)
        case 2:
            factor = chance.choice([f for f in range(1, n + 1) if n % f == 0])
            shape = (*t.shape[:d], factor, n // factor, *t.shape[d + 1 :])
            return m.reshape(*shape), t.reshape(shape)
        case 3 if t.ndim > 1:
            at = chance.randrange(t.ndim - 1)
            shape = (*t.shape[:at], t.shape[at] * t.shape[at + 1], *t.shape[at + 2 :])
            return m.reshape(*shape), t.reshape(shape)
        case 4:
            return concatenated([m, m], d), torch.cat([t, t], d)
        case 5:
            return padded(m, (1, -1 if t.shape[-1] > 1 else 0)), torch.nn.functional.pad(
                t, (1, -1 if t.shape[-1] > 1 else 0), value=-1
            )
        case 6:
            size = chance.randrange(1, n + 1)
            return viewed(m, lambda x: x.unfold(d, size, 2))[0], t.unfold(d, size, 2)
        case _:
            return repeated(m, d, 2), t.repeat_interleave(2, d)  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(40))
def test_views_name_the_right_elements(seed: int) -> None:
    chance = random.Random(seed)
    m, t = start(chance)
    for _ in range(6):
        if t.numel() < 600:
            m, t = step(chance, m, t)
        assert m.shape == tuple(t.shape) and numbers(m).equal(t)
    assert sum(torch.Size(p.shape).numel() for p in m.pieces) == t.numel()
    assert numbers(from_numbers(t, HOMES)).equal(t)
    flat = m.reshape(t.shape[0], t[0].numel())
    seen = torch.full(flat.shape, -2)
    for r in rectangles(flat):
        a, b, c, d = r.box
        block = torch.full((b - a, d - c), -1)
        if r.home is not None:
            top, bottom, left, right = r.home_box
            places = torch.arange(r.home.base, r.home.base + r.home.size).reshape(r.home.rows, -1)
            block = places[top:bottom, left:right]
        seen[a:b, c:d] = block.t() if r.turned else block
    assert seen.equal(t.reshape(flat.shape))


def test_large_maps_stay_small() -> None:
    home = Home("x", torch.bfloat16, 4096, 8192)
    heads = whole(home, (2, 2048, 64, 128)).permute(0, 2, 1, 3)
    assert len(heads.pieces) == 1
    back = heads.permute(0, 2, 1, 3).reshape(4096, 8192)
    assert back.only is home
    assert len(heads.reshape(128, 2048, 128).pieces) == 2
    assert len(rectangles(heads.reshape(128, 2048, 128).matrix(3, (0, 512), (0, 128)))) == 1
