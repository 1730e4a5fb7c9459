"""Ranks compare what they have: before a program runs for the first time, when it was edited, and when sizes change.

In: this rank's programs as lines, its plan and its part of the batch. Out: nothing, or an error on all ranks that says
who differs and where: in the sizes of the batch, the plan, the first equation that is not the same, with its line, or
the options of the optimizer. Ranks that stand at the same place of the data axes must have been given the same rows,
which a checksum tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor

from tessera.distributed.compare import everyones, first_difference
from tessera.distributed.plan import DATA
from tessera.distributed.sharding import Sharding
from tessera.distributed.users_line import at_users_line
from tessera.util.errors import MeshError


class Compiled(Protocol):
    @property
    def executable(self) -> object: ...

    digest: str


class Agreement:
    """The calls of one step or model. A rank whose sizes and program are those of its last call has nothing to ask.
    One whose sizes changed asks, although it knows a program for them: ranks whose batches differ in size would run
    together nevertheless, and each would take its own for the size of all."""

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding
        self.sizes: tuple = ()
        self.known: WeakSet[object] = WeakSet()  # programs that ranks have compared

    def knows(self, compiled: Compiled, sizes: tuple) -> bool:
        return sizes == self.sizes and compiled.executable in self.known

    @at_users_line
    def __call__(
        self,
        compiled: Compiled,
        sizes: tuple,
        leaves: Sequence[object],
        lines: Callable[[], Sequence[str]],
        options: Sequence[str] = (),
    ) -> None:
        """`lines` are the programs, `options` those of the optimizer's groups."""
        agree(self.sharding, leaves, compiled.digest, lines, compiled.executable not in self.known, options)
        self.known.add(compiled.executable)
        self.sizes = sizes


def agree(
    sharding: Sharding,
    leaves: Sequence[object],
    digest: str,
    lines: Callable[[], Sequence[str]],
    first: bool = True,
    options: Sequence[str] = (),
) -> None:
    """Raise on every rank where one of them differs. `digest` is that of the programs, `lines` are the programs. An
    optimizer's options are numbers that programs are given; with others on some ranks, parts of a weight would not be
    those of one. Rows are compared at the `first` call: a checksum waits for the device."""
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    here = sharding.device_mesh.get_coordinate() or []
    at = dict(zip(sharding.mesh.names, here, strict=True))
    mine = {
        "sizes": [f"{x.dtype} {list(x.shape)}" for x in tensors],
        "plan": f"{sharding.mesh}: {dict(sharding.plan.words)} {dict(sharding.plan.patterns)}",
        "place": [at[axis] for axis in sharding.plan.axes(*DATA)],
        "rows": [0 if isinstance(x, DTensor) else _checksum(x) for x in tensors] if first else [],
        "options": [*options],
        "program": digest,
    }
    every = everyones(mine)
    for what, told in (("sizes", "a batch of"), ("plan", "the plan")):
        _same(every, what, told)
    _same_rows(every)
    programs = {each["program"] for each in every}
    if len(programs) == 1:
        _same(every, "options", "an optimizer with")
    else:
        first_difference(everyones(list(lines())), "program")  # a line of a program ends with the user's


def _same(every: list[dict], what: str, told: str) -> None:
    for rank, each in enumerate(every):
        if each[what] != every[0][what]:
            raise MeshError(f"rank {rank} has {told} {each[what]}, rank 0 {every[0][what]}; expected the same on all")


def _same_rows(every: list[dict]) -> None:
    first: dict[tuple, int] = {}
    for rank, each in enumerate(every):
        other = first.setdefault(tuple(each["place"]), rank)
        pairs = zip(each["rows"], every[other]["rows"], strict=False)
        differing = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if differing is not None:
            raise MeshError(
                f"ranks {other} and {rank} stand at the same place of the data axes and were given different batches, "
                f"first in tensor {differing} of them, {each['sizes'][differing]}; expected the same rows, as a "
                "sampler by the place on those axes gives them"
            )


def _checksum(x: torch.Tensor) -> int:
    """A number that differs where the bits of tensors do, nearly always; computed where the tensor is."""
    x = (torch.view_as_real(x) if x.is_complex() else x).detach().contiguous().reshape(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.view(whole).to(torch.int64) + 1
    place = torch.arange(1, bits.numel() + 1, device=bits.device)
    place = (place ^ (place >> 7)) * 0x2545F4914F6CDD1D  # integers wrap around, on every device alike
    return int((bits * (place ^ (place >> 29))).sum())
