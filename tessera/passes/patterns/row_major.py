"""Activations that norms read row by row lie row by row.

In: a trace. Out: the same program, where a large activation whose rows are strided in memory is copied once, where the
first norm over its last dimension reads it, and everything after that reads the copy. A convolution gives its channels
before its places. A transformer behind it reads places before channels, and adds to what it read: as in eager, every
sum then follows the layout of the first, and each norm of each layer reads across memory, forward and backward.
"""

from __future__ import annotations

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.relayout import Relayout
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, overlaps_itself, size_hint
from tessera.util.names import names

NORMS = names("layer_norm rms_norm")
LARGE = 2**18  # elements: a smaller copy costs a launch and saves little
DEVICES = ("cuda",)  # where reading across rows was seen to cost


def row_major(trace: Trace) -> Trace:
    """Copy strided activations once, so that norms read rows."""
    if not any(map(_strided, trace.equations)):
        return trace
    rewrite = Relayout(trace)
    for eqn in rewrite:
        x = _strided(eqn)
        if x is not None and len(rewrite.users.get(x, ())) > 1:
            rewrite.copied(x, _copy(rewrite, x, eqn))
            eqn = rewrite.current(eqn)
        if rewrite.moved(eqn):
            rewrite.type_again(eqn)
    return rewrite.finish()


def _strided(eqn: Equation) -> Value | None:
    """What a norm reads across memory."""
    if eqn.opname not in NORMS:
        return None
    x = eqn.args[0]
    if not isinstance(x, Value) or not isinstance(x.type, TensorType) or x.type.device.type not in DEVICES:
        return None
    t = x.type
    if t.numel() < LARGE or size_hint(t.shape[-1]) == 1 or size_hint(t.stride[-1]) == 1:
        return None
    return None if overlaps_itself(t.shape, t.stride) else x


def _copy(rewrite: Relayout, x: Value, reader: Equation) -> Value:
    """Made where the value is made, as far as gradients go: the norm may stand under no_grad, other readers not."""
    with rewrite.at(rewrite.makers.get(x, reader.with_(tags=frozenset()))):
        return aten.clone(x, memory_format=torch.contiguous_format)
