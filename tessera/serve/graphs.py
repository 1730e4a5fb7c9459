"""A program whose steps come in few sizes, replayed as CUDA graphs: one launch a step, however many kernels.

In: filled steps, of the decode program in buckets or all of one size. Out: logits, in memory that the next step writes
again. A size is captured when it comes for the second time, so those that serving needs most are captured first; the
first time got its kernels ready. Where capturing fails, the program runs as before, and `reason` says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tessera.runtime.cudagraph import CUDA, Device
from tessera.serve.inputs import Filled, Inputs, Sizes
from tessera.util.log import log

MOST = 64  # sizes that are captured


class _Graph(NamedTuple):
    replay: Callable[[], None]
    flat: Tensor  # where it reads its inputs
    logits: Tensor


class Graphs:
    """`run` is the program; `groups` says how its inputs lie."""

    def __init__(self, run: Callable[[Inputs], Tensor], groups: int, device: torch.device, cuda: Device = CUDA):
        self._run, self._groups, self._device, self._cuda = run, groups, device, cuda
        self._pool: object = None
        self._seen: set[Sizes] = set()
        self.captured: dict[Sizes, _Graph] = {}
        self.reason: str | None = None

    def __call__(self, given: Filled) -> Tensor:
        graph = self.captured.get(given.sizes) or self._capture(given)
        if graph is None:
            return self._run(Inputs.of(given.flat.to(self._device, non_blocking=True), given.sizes, self._groups))
        graph.flat.copy_(given.flat, non_blocking=True)
        graph.replay()
        return graph.logits

    def _capture(self, given: Filled) -> _Graph | None:
        new = given.sizes not in self._seen
        self._seen.add(given.sizes)
        if new or self.reason is not None or len(self.captured) >= MOST:
            return None
        self._pool = self._pool or self._cuda.pool()
        flat = given.flat.to(self._device)
        inputs = Inputs.of(flat, given.sizes, self._groups)
        try:
            replay, (logits,) = self._cuda.capture(lambda: (self._run(inputs),), self._pool, self._device)
        except RuntimeError as error:
            self.reason = f"{type(error).__name__}: {error}"
            log(0, f"serve: steps are not replayed as CUDA graphs: {self.reason}")
            return None
        self.captured[given.sizes] = _Graph(replay, flat, logits)
        return self.captured[given.sizes]
