"""Where the chips of a stage stand, and those of the stages behind it.

In: a machine, how many chips share a tensor and how many such groups have other experts. Out: a `Stage`, a rectangle of
rectangles in the grid of chips, and the chips of several stages, by rank. Ranks are those of its mesh: first groups,
then the chips of a group, each along both sides of their rectangle.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from tessera.ir.mesh import Mesh
from tessera.machines.spatial import Core, SpatialMachine
from tessera.util.errors import OptionError

PATCH = 256  # cores of a chip that are used, where it has more, besides
SPARE = 4  # times as many as hold the weights
Sides = tuple[int, int]


@dataclass(frozen=True)
class Stage:
    groups: Sides  # that have other experts
    sharing: Sides  # chips of a group, which share every tensor

    @functools.cached_property
    def mesh(self) -> Mesh:
        apart = {} if self.groups == (1, 1) else dict(zip(GROUP_AXES, self.groups, strict=True))
        return Mesh.of(apart | dict(zip(SHARING_AXES, self.sharing, strict=True)))

    @property
    def sharing_axes(self) -> tuple[str, ...]:
        return SHARING_AXES

    @property
    def group_axes(self) -> tuple[str, ...]:
        return () if self.groups == (1, 1) else GROUP_AXES

    @property
    def sides(self) -> Sides:
        return self.groups[0] * self.sharing[0], self.groups[1] * self.sharing[1]

    def places(self) -> Iterator[Sides]:
        """The place of each rank in the rectangle."""
        for a, b, c, d in itertools.product(*map(range, (*self.groups, *self.sharing))):
            yield a * self.sharing[0] + c, b * self.sharing[1] + d


GROUP_AXES, SHARING_AXES = ("groups_down", "groups_across"), ("down", "across")


def stage_of(machine: SpatialMachine, tensor: int, experts: int = 1) -> Stage:
    """So many chips as rectangles of the grid that chips stand in, as square as can be."""
    rows, columns = shape(machine)
    for sharing in _rectangles(tensor):
        for groups in _rectangles(experts):
            stage = Stage(groups, sharing)
            if stage.sides[0] <= rows and stage.sides[1] <= columns:
                return stage
    count = tensor * experts
    raise OptionError(f"cut: {count} chips of {machine.key} make no rectangle of its {rows}×{columns}")


def _rectangles(count: int) -> Iterator[Sides]:
    for down in range(math.isqrt(count), 0, -1):
        if count % down == 0:
            yield down, count // down
            yield count // down, down


def shape(machine: SpatialMachine) -> Sides:
    """The grid that chips stand in; of those that are joined otherwise, one row."""
    chips = machine.chips
    grid = chips.shape if chips is not None and chips.topology in ("mesh", "torus") else None
    return grid or (1, machine.chip_count)


def fits(machine: SpatialMachine, tensor: int, experts: int, stages: int) -> bool:
    try:
        stages_on(machine, stage_of(machine, tensor, experts), stages)
    except OptionError:
        return False
    return True


def stages_on(machine: SpatialMachine, stage: Stage, count: int) -> list[list[int]]:
    """The chips of each stage, by rank: rectangles side by side, back and forth, so that stages are neighbours."""
    (rows, columns), (down, across) = shape(machine), stage.sides
    corners = []
    for i in range(rows // down):
        line = [(i, j) for j in range(columns // across)]
        corners += line if i % 2 == 0 else line[::-1]
    if len(corners) < count:
        raise OptionError(
            f"cut: {machine.key} has room for {len(corners)} stages of {down}×{across} chips, not {count}"
        )
    return [[(i * down + a) * columns + j * across + b for a, b in stage.places()] for i, j in corners[:count]]


def patch(machine: SpatialMachine, chip: int, wanted: int) -> tuple[Core, ...]:
    """The cores of a chip; of one that has far more than are wanted, a square of them around a port of the host."""
    rows, columns = machine.chip.grid
    if rows * columns <= max(wanted, PATCH) or machine.host is None:
        return machine.cores(chip)
    ports = [core for place in machine.host.cores if machine.network.alive(core := Core(chip, *place))]
    if not ports:
        return machine.cores(chip)
    port = ports[len(ports) // 2]
    across = min(columns, math.isqrt(wanted - 1) + 1)
    down = min(rows, -(-wanted // across))
    top = min(max(0, port.row - down // 2), rows - down)
    left = min(max(0, port.column - across // 2), columns - across)
    inside, reached = [port], {port}
    for core in inside:  # what is dead may cut off some of them
        for other in machine.neighbours(core):
            near = top <= other.row < top + down and left <= other.column < left + across
            if near and other.chip == chip and other not in reached:
                reached.add(other)
                inside.append(other)
    return tuple(sorted(inside))
