"""Mixed precision, from Trace to Trace.

In: a trace, a device and a dtype. Out: the trace that `torch.autocast` would have run: PyTorch's own policy decides
which operators run in the lower precision and which in float32, and its casts are equations like any other.
"""

from __future__ import annotations

import torch

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.mode import mode_of
from tessera.ir.record import record
from tessera.ir.replay import replay
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops.op import keep_whole
from tessera.torch_internals.fake import FakeTensorMode
from tessera.util.errors import InputError


def autocast(
    trace: Trace, device: str = "cuda", dtype: torch.dtype | None = None, mode: FakeTensorMode | None = None
) -> Trace:
    """The trace as it runs under `torch.autocast(device, dtype)`."""
    for v in trace.inputs:
        if not isinstance(v.type, TensorType):
            raise InputError(f"autocast: expected a trace whose inputs are tensors, got {v}")
    mode = mode or mode_of(trace)

    def run(*fakes: torch.Tensor) -> list:
        with torch.autocast(device, dtype=dtype, cache_enabled=False):
            return replay(trace, fakes, casts=True)

    with fake.alone(), torch.enable_grad():
        fakes = [fake.fake_of(v.tensor, mode) for v in trace.inputs]
        names = [v.name for v in trace.inputs]
        recorded, _ = record(run, fakes, names, keep_whole, Builder(trace.name, mode))  # type: ignore[arg-type]
    return recorded
