"""The last call of everything that is compiled while it looks on, so that a script's programs can be run again.

In: nothing; it watches. Out: for each compilation the arguments it was last called with, in the order of those calls,
and a step that makes the same calls again, each with its backward. What lies between the calls is not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from tessera.pipeline import compilation as pipelines
from tessera.pipeline.compilation import Compilation
from tessera.runtime.autograd import below_autograd
from tessera.tools.profile.gradients import pull


class Calls:
    def __init__(self) -> None:
        self.last: dict[Compilation, tuple] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Remember the arguments of every compilation that is made meanwhile; afterwards they are as they were."""
        originals = {}

        def see(compilation: Compilation) -> None:
            call = originals[compilation] = compilation.executable.call

            def remembering(*args: object) -> object:
                self.last.pop(compilation, None)  # the order is that of the last calls
                self.last[compilation] = args
                return call(*args)

            compilation.executable.call = remembering

        pipelines.WATCHERS.append(see)
        try:
            yield
        finally:
            pipelines.WATCHERS.remove(see)
            for compilation, call in originals.items():
                compilation.executable.call = call

    def step(self, backward: bool = True) -> None:
        """Every remembered call once more."""
        for compilation, args in self.last.items():
            trains = any(program.name == "backward" for program in compilation.account.programs)
            inputs = [_apart(x) for x in args]
            with nullcontext() if trains else below_autograd():
                out = compilation.executable.call(*inputs)
            if trains and backward:
                pull(out)


def _apart(x: object) -> object:
    """What another graph gave stands here as an input of its own: that graph has run its backward already."""
    if isinstance(x, torch.Tensor) and x.requires_grad and not x.is_leaf:
        return x.detach().requires_grad_()
    return x
