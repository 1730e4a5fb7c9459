"""The Python around one launch of many regions: what such a callable does at every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tessera.ir.strides import with_strides
from tessera.ir.trace import Trace
from tessera.tile.targets.base import CompiledKernel, Run


@dataclass(frozen=True)
class Segment:
    """One of many regions: where its buffers stand among the arguments and results of the whole."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class OneByOne:
    """For a target that knows no launch of many segments."""

    compiled: CompiledKernel

    @property
    def source(self) -> str:
        return self.compiled.source

    def __call__(self, rows: Sequence[Sequence[torch.Tensor]], lengths: Sequence[int]) -> None:
        for tensors, length in zip(rows, lengths, strict=True):
            self.compiled(tensors, (length,))


def launcher(whole: Trace, segments: Sequence[Segment], run: Run, over: dict[int, int]) -> Callable[..., tuple]:
    """A function of the whole's inputs. Output k is written over input `over[k]`; the others are given back."""
    strides = [tuple(v.tensor.stride) for v in whole.inputs]
    shaped = [i for i, v in enumerate(whole.inputs) if v.ndim]
    outputs = [v.tensor for v in whole.outputs]  # type: ignore[union-attr]
    fresh = [k for k in range(len(outputs)) if k not in over]
    lengths = [s.length for s in segments]
    empty = torch.empty_strided

    def launch(*args: torch.Tensor) -> tuple:
        tensors = list(args)
        for i in shaped:
            if tensors[i].stride() != strides[i]:
                tensors[i] = with_strides(tensors[i].detach(), strides[i])
        results: dict[int, torch.Tensor] = {k: tensors[j] for k, j in over.items()}
        for k in fresh:
            t = outputs[k]
            results[k] = empty(t.shape, t.stride, dtype=t.dtype, device=t.device)
        rows = [[*[tensors[i] for i in s.inputs], *[results[k] for k in s.outputs]] for s in segments]
        run(rows, lengths)
        for j in over.values():  # an input of another layout was copied to be written
            if tensors[j] is not args[j]:
                args[j].copy_(tensors[j])
        return tuple(results[k] for k in fresh)

    return launch
