"""Whether a program can be a CUDA graph.

In: a final program. Out: the reason why not, in words; empty where it can. A graph is the work of one device, decided
before it runs: nothing may ask the device for a value, live on the host, or take a size from the data.
"""

from __future__ import annotations

import torch

from tessera.ir.check import RAISE_IF
from tessera.ir.equation import Equation, Special
from tessera.ir.trace import Trace
from tessera.ir.types import OpaqueType, TensorType
from tessera.torch_internals.operators import OpOverload, op_name

TO_HOST = "to_host"  # the operator of `ops/offload.py`, which running alone does not need
ASKS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def device_of(trace: Trace) -> torch.device | None:
    """The one GPU that everything is on."""
    devices = {v.type.device for v in trace.values() if isinstance(v.type, TensorType)}
    only = devices.pop() if len(devices) == 1 else None
    return only if only is not None and only.type == "cuda" else None


def why_not_captured(trace: Trace) -> str:
    if moved := [eqn for eqn in trace.equations if eqn.opname == TO_HOST]:
        return f"{moved[0].inputs()[0].name} waits on the host for backward (offload)"
    for v in trace.values():
        if isinstance(v.type, TensorType) and v.type.device.type != "cuda":
            return f"{v.name} is on {v.type.device}"
        if isinstance(v.type, OpaqueType):
            return f"{v.name} is a {v.type}, which only the host can use"
    if device_of(trace) is None:
        return "its tensors are on several devices"
    for symbol in trace.symbols:
        if symbol.startswith(("u", "zuf")):
            return "a size is known only when the program runs"
    for eqn in trace.equations:
        if reason := _asks(eqn):
            return reason
    return ""


def _asks(eqn: Equation) -> str:
    op = eqn.op
    if isinstance(op, Special):
        if any(isinstance(a, Trace) for a in (*eqn.args, *eqn.kwargs.values())) and op.body is None:
            return f"{op!r} decides on the host what runs"
        if op is RAISE_IF:
            return f"{op!r} waits for a value from the device ({eqn.source})"
        op = op.of
    if isinstance(op, OpOverload) and (any(tag in op.tags for tag in ASKS) or op_name(op) in ("item", "equal")):
        return f"{op} waits for a value from the device ({eqn.source})"
    return ""
