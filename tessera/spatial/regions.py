"""Which tiles keep to banks of their own.

In: tiles. Out: the number of a region for each. An array holds the banks of its weights and of what streams through it
for long; so weights, what arrives, products and what the vector unit writes lie in regions apart, where there are
banks enough, and neighbours of one kind take turns. Arrays of one core work side by side only on operands in different
banks; so where there are several, every kind has as many regions.
"""

from __future__ import annotations

from tessera.machines.spatial import Core
from tessera.spatial.tiles import Assembled, Held, Loaded, Multiplied, Received, Tile

# By how many regions there are: those of weights of products, of what arrives from other cores, of products, of what
# the host or off-chip memory sends, of everything else.
_ROLES = {
    1: ((0,), (0,), (0,), (0,), (0,)),
    2: ((0,), (0,), (1,), (1,), (1,)),
    4: ((0,), (1,), (2,), (3,), (3,)),
    8: ((0,), (1, 2), (3, 4), (5,), (6,)),
}
KINDS = 5


def for_arrays(arrays: int) -> int:
    """How many regions let so many arrays of a core work side by side."""
    return KINDS * arrays


def _roles(most: int) -> tuple[tuple[int, ...], ...]:
    if most > max(_ROLES):
        each = most // KINDS
        return tuple(tuple(range(kind * each, (kind + 1) * each)) for kind in range(KINDS))
    return _ROLES[max(count for count in _ROLES if count <= most)]


def regions_of(tiles: list[Tile], most: int) -> dict[Tile, int]:
    roles = _roles(most)
    factors = {part.tile for t in tiles if isinstance(t, Multiplied) for _, part in t.factors}
    turns: dict[tuple[Core, int], int] = {}
    regions: dict[Tile, int] = {}
    for tile in tiles:
        if tile.buffer is not tile:
            continue
        match tile:
            case Held():
                role = 0 if tile in factors else 4
            case Assembled():
                role = 1
            case Multiplied():
                role = 2
            case Received() | Loaded():
                role = 3
            case _:
                role = 4
        turn = turns[tile.core, role] = turns.get((tile.core, role), -1) + 1
        regions[tile] = roles[role][turn % len(roles[role])]
    return regions
