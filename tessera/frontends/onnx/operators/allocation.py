"""How much a few bytes of a file may ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context


def allowed(shape: Sequence, bytes_each: int, context: Context) -> Sequence:
    """A shape that a few bytes of a file describe, if it is within the limit. Symbols are sizes of inputs."""
    if all(type(n) is int for n in shape) and math.prod(shape) * bytes_each > context.limits.tensor_bytes:
        raise OnnxError(
            f"{context.node}: a tensor of {list(shape)} takes more than the limit of {context.limits.tensor_bytes} "
            "bytes; tessera.onnx.load(..., limits=) takes another"
        )
    return shape
