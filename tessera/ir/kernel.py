"""What an executor made of a region: a function that programs call, and what passes ask about it.

An executor may give a plain callable instead; then there is nothing to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tessera.ir.types import TensorType, Type


@dataclass(frozen=True)
class Operand:
    """Where a kernel finds what it reads: in the argument of this number and type, so many elements from its start."""

    argument: int
    type: Type
    start: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernel:
    """`run` takes a region's inputs and gives the tuple of its outputs. Programs bind it, not this object: a plain
    function is called quickest."""

    run: Callable[..., tuple]
    source: str = ""  # of `run`, where it was generated
    # By the number of a result, the arguments that it may be written over.
    overwrites: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # Given such results with an argument each: the same kernel, which writes them there and does not give them back.
    writing: Callable[[dict[int, int]], Kernel] | None = None
    # Given where each input lies, and results by number that are to have another shape: the same kernel over those.
    reading: Callable[[tuple[Operand, ...], dict[int, TensorType]], Kernel] | None = None
    _over: dict[tuple[tuple[int, int], ...], Kernel] = field(init=False, default_factory=dict, repr=False)

    def over(self, results: dict[int, int]) -> Kernel:
        """The same kernel with these results written over arguments; of equal layers all get the same one."""
        assert self.writing is not None
        key = tuple(results.items())
        if key not in self._over:
            self._over[key] = self.writing(results)
        return self._over[key]

    def __call__(self, *args: object) -> tuple:
        return self.run(*args)

    @property
    def origin(self) -> object:
        """The same for a kernel and those that `writing` made of it."""
        return self


def bound(callee: Callable) -> tuple[Callable, Kernel | None]:
    """Of what an executor made, the function that programs call and what can be asked about it."""
    return (callee.run, callee) if isinstance(callee, Kernel) else (callee, None)
