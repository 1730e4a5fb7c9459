"""A mesh: ranks in a grid whose axes have names, as a program sees it.

In: names and sizes of axes, slowest first, as PyTorch's DeviceMesh has them. Out: sizes of axes and coordinates of
ranks. A Mesh holds no process group, so a machine without any can write programs for one of any size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from tessera.util.errors import OptionError


@dataclass(frozen=True)
class Mesh:
    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for name, size in self.axes:
            if not name.isidentifier():
                raise OptionError(f"mesh: expected axes with names such as dp and tp, got {name!r}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise OptionError(f"mesh: expected the axis {name} to have 1 rank or more, got {size!r}")
        if len(set(self.names)) != len(self.axes):
            raise OptionError(f"mesh: expected a name for each axis, got one twice: {', '.join(self.names)}")

    @classmethod
    def of(cls, axes: Mapping[str, int] | None = None, /, **named: int) -> Mesh:
        """`Mesh.of(dp=4, tp=2)`."""
        return cls(tuple({**(axes or {}), **named}.items()))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def size(self, axis: str) -> int:
        """How many ranks stand along an axis."""
        if axis not in self.sizes:
            raise OptionError(f"expected an axis of the mesh {self}, got {axis!r}")
        return self.sizes[axis]

    @property
    def ranks(self) -> int:
        return prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        places: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, places[name] = divmod(rank, size)
        return places

    def rank(self, places: Mapping[str, int]) -> int:
        number = 0
        for name, size in self.axes:
            number = number * size + places[name]
        return number

    def peers(self, rank: int, axis: str) -> list[int]:
        """The ranks along an axis through this one, in order."""
        here = self.coordinates(rank)
        return [self.rank({**here, axis: i}) for i in range(self.size(axis))]

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes)
