"""A block of equations in SSA form: what a Trace is made of.

    block  ::= inputs; constants; equations; mutations; outputs

Every Value is defined once, by an input, a constant or an equation, before it is used. A mutation says that
an input ends up holding another value; it is the only way in which a block acts on its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from tessera.ir.equation import Arg, Equation, Value, values_in


@dataclass(frozen=True, eq=False, repr=False)
class Block:
    name: str
    inputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Arg, ...]  # flat; Values or plain constants
    mutations: dict[Value, Value] = field(default_factory=dict)  # input -> what it holds afterwards
    constants: dict[Value, torch.Tensor] = field(default_factory=dict)  # tensors closed over
    symbols: dict[str, tuple[Value, int | None]] = field(default_factory=dict)  # s0 -> (input, dimension)

    def with_(self, **changes: object) -> Self:
        return replace(self, **changes)  # type: ignore[arg-type]

    def values(self) -> Iterator[Value]:
        yield from self.inputs
        yield from self.constants
        for eqn in self.equations:
            yield from eqn.results()

    def results(self) -> list[Value]:
        """Every Value that must be there at the end: outputs and the new contents of mutated inputs."""
        return [*values_in(self.outputs), *self.mutations.values()]

    def makers(self) -> dict[Value, Equation]:
        return {v: eqn for eqn in self.equations for v in eqn.outputs if v is not None}

    def places(self) -> dict[Value, int]:
        """Value -> the number of the equation that makes it."""
        return {v: i for i, eqn in enumerate(self.equations) for v in eqn.outputs if v is not None}

    def users(self) -> dict[Value, list[Equation]]:
        users: dict[Value, list[Equation]] = {}
        for eqn in self.equations:
            for v in dict.fromkeys(eqn.inputs()):
                users.setdefault(v, []).append(eqn)
        return users

    def inner(self) -> list[Block]:
        """The blocks that equations hold as arguments."""
        return [a for eqn in self.equations for a in eqn.args if isinstance(a, Block)]

    def nested(self) -> list[Block]:
        """This block and those inside of it, at any depth."""
        return [self, *(block for body in self.inner() for block in body.nested())]
