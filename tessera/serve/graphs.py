"""Steps that come in few sizes, replayed as CUDA graphs: one launch a step, however many kernels.

In: filled steps, in buckets or all of one size. Out: logits, in memory that the next step writes again. A size is
captured when it comes for the second time, so those that serving needs most are captured first; the first time got its
kernels ready. Where capturing fails, programs run as before, and `reason` says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tessera.runtime.cudagraph import CUDA, Device
from tessera.serve.inputs import Filled, Inputs, Sizes
from tessera.util.log import log

MOST = 64  # sizes of one program that are captured


class _Graph(NamedTuple):
    replay: Callable[[], None]
    flat: Tensor  # where it reads its inputs
    logits: Tensor


class Graphs:
    """`run` runs the program of that name; `groups` says how inputs lie."""

    def __init__(self, run: Callable[[str, Inputs], Tensor], groups: int, device: torch.device, cuda: Device = CUDA):
        self._run, self._groups, self._device, self._cuda = run, groups, device, cuda
        self._pool: object = None
        self._seen: set[tuple[str, Sizes]] = set()
        self.captured: dict[tuple[str, Sizes], _Graph] = {}
        self.reason: str | None = None

    def __call__(self, name: str, given: Filled, capture: bool = True) -> Tensor:
        """Run a step. Capturing takes as long as several steps: without `capture` that is left for another time."""
        graph = self.captured.get((name, given.sizes)) or (self._capture(name, given) if capture else None)
        if graph is None:
            return self._run(name, Inputs.of(given.flat.to(self._device, non_blocking=True), given.sizes, self._groups))
        graph.flat.copy_(given.flat, non_blocking=True)
        graph.replay()
        return graph.logits

    def _capture(self, name: str, given: Filled) -> _Graph | None:
        key = name, given.sizes
        new = key not in self._seen
        self._seen.add(key)
        if new or self.reason is not None or sum(other == name for other, _ in self.captured) >= MOST:
            return None
        self._pool = self._pool or self._cuda.pool()
        flat = given.flat.to(self._device)
        inputs = Inputs.of(flat, given.sizes, self._groups)
        try:
            replay, (logits,) = self._cuda.capture(lambda: (self._run(name, inputs),), self._pool, self._device)
        except RuntimeError as error:
            self.reason = f"{type(error).__name__}: {error}"
            log(0, f"serve: steps are not replayed as CUDA graphs: {self.reason}")
            return None
        self.captured[key] = _Graph(replay, flat, logits)
        return self.captured[key]
