"""Who takes part where nobody names executors: the flag `executors`, read in one place.

In: the flag's text. Out: names in priority order. `auto` stands for programs over few rows, attention as a whole, sums
of bags, Tessera's own kernels, then ATen; on a machine where no target of the tile compiler is installed, for the same
without kernels. A device that has no target beside one that does needs no list of its own: kernels claim nothing there.
"""

from __future__ import annotations

from tessera.tile.targets import TARGETS, missing

AUTO = "auto"
WITH_KERNELS = ("rows", "attention", "bags", "sdpa", "tile", "aten")
PLAIN = ("sdpa", "aten")


def named(text: str) -> tuple[str, ...]:
    """'sdpa,tile,aten' -> ('sdpa', 'tile', 'aten'); 'auto' -> what serves this machine best."""
    if text == AUTO:
        return PLAIN if all(missing(target) for target in TARGETS) else WITH_KERNELS
    return tuple(filter(None, text.split(",")))
