"""Which equations end what one ONNX operator says.

In: a trace and the opset. Out: for the last equation of each such part the function that writes the operator. What
stands before it is written too, and goes again where nothing else reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tessera.exporters.onnx.graph import Ref
from tessera.exporters.onnx.patterns.heads import shared_heads
from tessera.exporters.onnx.patterns.makers import Makers
from tessera.exporters.onnx.patterns.norm import rms_norm
from tessera.exporters.onnx.patterns.rotary import rotary
from tessera.ir.equation import Equation
from tessera.ir.trace import Trace

if TYPE_CHECKING:
    from tessera.exporters.onnx.lower import Lowering

Write = Callable[["Lowering"], Ref]
SINCE = 23  # the first opset with RMSNormalization, RotaryEmbedding and Attention
PATTERNS = (rms_norm, rotary, shared_heads)


def whole_operators(trace: Trace, opset: int) -> dict[Equation, Write]:
    if opset < SINCE:
        return {}
    makers = Makers(trace)
    parts: dict[Equation, Write] = {}
    for eqn in trace.equations:
        for pattern in PATTERNS:
            write = pattern(eqn, makers)
            if write is not None:
                parts[eqn] = write
                break
    return parts
