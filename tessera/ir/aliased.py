"""Outputs of a program that are made again as views: of an input, or of another output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tessera.ir.equation import map_values
from tessera.torch_internals import pytree
from tessera.torch_internals.operators import OpOverload

Step = tuple[OpOverload, tuple, dict, int | None, bool]  # a view, which of its results, whether made under no_grad


@dataclass(frozen=True)
class Result:
    """Among the arguments of a view: a number that the compiled program gives, by its place among the results."""

    place: int


@dataclass(frozen=True)
class Aliased:
    """Output = steps applied to an input, or to another output of the trace, one view after another. Numbers that the
    program computes are values among the arguments of a step, and outputs of the trace too."""

    source: int  # position among the inputs, or among the trace's outputs
    steps: tuple[Step, ...]
    of_output: bool = False
    shared: tuple[int, int] | None = None  # another output, and how many first steps give the same object

    @property
    def asks(self) -> bool:
        """Whether it needs numbers of the program."""
        return any(isinstance(a, Result) for a in pytree.tree_leaves(self.steps))

    def part(self, begin: int, end: int) -> Aliased:
        """Some of its steps alone."""
        return replace(self, steps=self.steps[begin:end], shared=None)

    def with_places(self, places: Mapping[object, int]) -> Aliased:
        """With places of results for the values among the arguments of its steps."""
        return replace(self, steps=map_values(self.steps, lambda v: Result(places[v])))  # type: ignore[arg-type]

    def make(self, x: torch.Tensor, results: Sequence[object] = ()) -> torch.Tensor:
        steps = pytree.tree_map_only(Result, lambda r: results[r.place], self.steps) if results else self.steps
        for op, args, kwargs, index, no_grad in steps:
            if no_grad:
                with torch.no_grad():
                    out = op(x, *args, **kwargs)
            else:
                out = op(x, *args, **kwargs)
            x = out if index is None else out[index]
        return x
