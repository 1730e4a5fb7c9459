"""Runs a program of tiles, tile by tile, in the machine's precision: the oracle for everything below.

In: tiles, the machine, the inputs. Out: the outputs. Products add what one fill of the array holds exactly, and
round; parts are added in order. Expressions are computed in float32 (float64 where an operand is) and rounded when
they are written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tessera.machines.spatial import SpatialMachine
from tessera.machines.spatial.schema import FUNCTIONS as NAMES
from tessera.spatial.graph import Number, Tree, functions
from tessera.spatial.listing.host import computed, operands
from tessera.spatial.listing.types import WHOLE
from tessera.spatial.tiles import (
    Assembled,
    Computed,
    Gathered,
    Held,
    Loaded,
    Multiplied,
    Part,
    Received,
    Scattered,
    Tile,
    Tiles,
)

# A function means what PyTorch's of that name means, but for these.
_OWN: dict[str, Callable[..., torch.Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "softplus": F.softplus,
    "where": lambda c, a, b: torch.where(c != 0, a, b),
    "sum": lambda x: x.sum(-1, keepdim=True), "max": lambda x: x.amax(-1, keepdim=True),
    "min": lambda x: x.amin(-1, keepdim=True), "argmax": lambda x: x.argmax(-1, keepdim=True),
    "argmin": lambda x: x.argmin(-1, keepdim=True),
}  # fmt: skip
FUNCTIONS = {name: _OWN.get(name) or getattr(torch, name, None) or getattr(torch.special, name) for name in NAMES}


def run(tiles: Tiles, machine: SpatialMachine, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    host = {
        name: x.reshape(-1, shape[-1] if shape else 1) for (name, _, shape), x in zip(tiles.inputs, inputs, strict=True)
    }
    env: dict[Tile, torch.Tensor] = {}
    shapes = {name: (dtype, shape) for name, dtype, shape in (*tiles.outputs, *tiles.hosted)}

    def part(p: Part) -> torch.Tensor:
        top, bottom, left, right = p.box
        block = env[p.tile][top:bottom, left:right]
        return block.t() if p.turned else block

    def given(name: str) -> torch.Tensor:
        """What the host was sent."""
        dtype, shape = shapes[name]
        of = torch.zeros(shape, dtype=dtype).reshape(-1, shape[-1] if shape else 1)
        for one in tiles.given:
            if one.tensor == name:
                top, bottom, left, right = one.box
                of[top:bottom, left:right] = part(one.part)
        return of.reshape(shape)

    calls = {name: called.action for called in tiles.calls for name in called.action.results}
    for tile in tiles.tiles:
        if isinstance(tile, Received) and tile.tensor not in host:
            call = calls[tile.tensor]
            got = computed(call, {name: given(name) for name in operands(call)})
            host |= {
                name: x.reshape(-1, x.shape[-1] if x.ndim else 1) for name, x in zip(call.results, got, strict=True)
            }
        env[tile] = _value(tile, tiles, machine, host, env, part)
        assert tuple(env[tile].shape) == (tile.rows, tile.columns) and env[tile].dtype == tile.dtype, tile.name
    return [given(name) for name, _, _ in tiles.outputs]


def _value(tile: Tile, tiles: Tiles, machine: SpatialMachine, host: dict[str, torch.Tensor],
           env: dict[Tile, torch.Tensor], part: Callable[[Part], torch.Tensor]) -> torch.Tensor:  # fmt: skip
    match tile:
        case Held() | Received() | Loaded():
            source = host if isinstance(tile, Received) else tiles.tensors
            top, bottom, left, right = tile.box
            return source[tile.tensor][top:bottom, left:right]
        case Assembled():
            out = torch.zeros(tile.rows, tile.columns, dtype=tile.dtype)
            for p, row, column in tile.moves:
                block = part(p)
                out[row : row + block.shape[0], column : column + block.shape[1]] = block
            return out
        case Multiplied():
            total = None
            for x, w in tile.factors:
                total = multiply(part(x), part(w), machine, tile.dtype, total)
            assert total is not None
            return total
        case Computed():
            return expression(tile.tree, [part(p) for p in tile.operands], tile.dtype, (tile.rows, tile.columns))
        case Gathered():
            return part(tile.table)[part(tile.index).reshape(-1).long()]
        case Scattered():
            after = part(tile.state).clone()
            after[part(tile.index).reshape(-1).long()] = part(tile.values)
            return after
    raise AssertionError(tile)


def multiply(
    x: torch.Tensor, w: torch.Tensor, machine: SpatialMachine, dtype: torch.dtype, total: torch.Tensor | None
) -> torch.Tensor:
    """A product as the array takes it; `total` is what it is added to."""
    k = x.shape[1]
    step = k if machine.matrix.stationary == "output" else machine.matrix.rows
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    for at in range(0, k, step):
        exact = (x[:, at : at + step].to(wide) @ w[at : at + step].to(wide)).to(dtype)
        total = exact if total is None else total + exact
    assert total is not None
    return total


def computing_type(tree: Tree, dtypes: set[torch.dtype]) -> torch.dtype:
    """The one type in which an expression is computed."""
    if torch.float64 in dtypes:
        return torch.float64
    floats = any(d.is_floating_point for d in dtypes) or any(isinstance(n, float) for n in _numbers(tree))
    if floats or not WHOLE.issuperset(functions(tree)):
        return torch.float32
    return torch.int64 if torch.int64 in dtypes else torch.int32


def _numbers(tree: Tree) -> list[float | int]:
    if isinstance(tree, Number):
        return [tree.value]
    return [] if isinstance(tree, int) else [n for a in tree.args for n in _numbers(a)]


def expression(tree: Tree, operands: list[torch.Tensor], dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
    wide = computing_type(tree, {o.dtype for o in operands})
    args = [o.to(wide) for o in operands]

    def value(t: Tree) -> torch.Tensor:
        if isinstance(t, int):
            return args[t]
        if isinstance(t, Number):
            return torch.tensor(t.value).to(wide)
        return FUNCTIONS[t.fn](*map(value, t.args)).to(wide)

    result = value(tree)
    if result.is_floating_point() and not dtype.is_floating_point and dtype != torch.bool:
        limits = torch.iinfo(dtype)
        result = result.round().clamp(limits.min, limits.max)
    return result.to(dtype).expand(shape)
