"""What a schedule comes to on a CPU: which axis the lanes of its registers lie along, and how it is cut.

`choose` makes it of a schedule and a host; `lower` writes a kernel by it, and `entry` what runs the kernel's tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.tile.targets.cpu.product import Product


@dataclass(frozen=True)
class Choice:
    """What a schedule comes to on this machine."""

    vector: str | None  # the axis along which lanes lie
    lanes: int  # of a chunk
    native: int  # of a register
    block: int  # of the vector axis, in one task
    tile: str | None = None  # an axis that goes by squares with the vector axis: for transposed loads, or a product
    product: Product | None = None  # with few rows: its columns are the vector axis, its rows the tile
    piece: int = 0  # a vector axis that is reduced goes by pieces of this length, and these by chunks
