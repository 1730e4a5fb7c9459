"""What has to be offered to run tile kernels.

A target belongs to one machine, whose figures decide what it proposes. It turns a kernel and a schedule into something
that runs, and proposes schedules for a kernel at given sizes. A compiled kernel is called with the tensors of its
buffers and the values of its symbols, in the kernel's order; it writes into the tensors, on their device (a GPU kernel
goes to the current stream), and returns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:  # whoever only runs kernels needs no dialect
    from tessera.machines import Machine
    from tessera.tile.dialect.ops import KernelOp
    from tessera.tile.schedules.schedule import Schedule


class CompiledKernel(Protocol):
    @property
    def source(self) -> str:
        """Readable text of what runs."""
        ...

    def __call__(self, tensors: Sequence[torch.Tensor], symbols: Sequence[int]) -> None: ...


@runtime_checkable
class ByAddress(Protocol):
    """A compiled kernel that takes its tensors' addresses, too."""

    @property
    def by_address(self) -> Callable[..., None]: ...


@runtime_checkable
class AtAddresses(Protocol):
    """A compiled kernel that can be launched by addresses on a device of this number, once it has been called."""

    def at(self, device: int, addresses: Sequence[int], sizes: tuple[int, ...] = ()) -> bool:
        """False: nothing happened, and it has to be called."""
        ...


@runtime_checkable
class Ahead(Protocol):
    """A compiled kernel that can be made ready in the background, before it is first called."""

    def ahead(self, device: torch.device) -> None: ...


class Run(Protocol):
    """One launch of a flat kernel over many segments: the tensors of each, and their lengths."""

    @property
    def source(self) -> str: ...

    def __call__(self, rows: Sequence[Sequence[torch.Tensor]], lengths: Sequence[int]) -> None: ...


@runtime_checkable
class Keeps(Protocol):
    """A target whose compiled kernels can be kept on disk and used without lowering or emitting anything again."""

    def about(self) -> str:
        """What kept kernels depend on besides their own text: versions, and the machine where one is needed."""
        ...

    def save(self, compiled: CompiledKernel) -> dict | None:
        """A compiled kernel as data that JSON holds; None where that cannot be."""
        ...

    def load(self, data: dict, kernel: Callable[[], KernelOp]) -> CompiledKernel | None:
        """The compiled kernel again; None where something that it needs is gone. `kernel` makes the tile kernel, for
        whoever needs it after all."""
        ...


@runtime_checkable
class Batches(Protocol):
    """A target that runs many segments in one launch, and keeps such launches too."""

    def batch(self, kernel: KernelOp, schedule: Schedule) -> Run: ...

    def save_batch(self, run: Run, longest: int) -> dict | None: ...

    def load_batch(self, data: dict, kernel: Callable[[], KernelOp]) -> Run: ...


class Target(Protocol):
    name: str

    @property
    def machine(self) -> Machine: ...

    def compile(self, kernel: KernelOp, schedule: Schedule) -> CompiledKernel: ...

    def propose(self, kernel: KernelOp, sizes: dict[str, int]) -> list[Schedule]:
        """Schedules worth trying for these values of the symbols: best first, and the same every time."""
        ...

    def no_sums_over_rows(self, row: int | None) -> str:
        """Why there is no good kernel that reduces rows of this length (None: not known) and sums over the rows too."""
        ...

    def no_product(self, rows: int, columns: int, depth: int) -> str:
        """Why there is no good kernel for a matrix product of these sizes, whatever else it computes."""
        ...
