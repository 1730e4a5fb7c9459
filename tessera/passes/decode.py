"""Finds the places for the operators of `ops/rows` in a program over few rows.

In: a functional trace without gradients. Out: the same program, where linear layers over at most sixteen rows are
`rows_linear` (`decode_linear`), and attention of one query over a cache is `decode_attention`, the cache's new
contents `cache_write` (`decode_attention`). Only where `runs(device)`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.passes.decode_attention import Attention
from tessera.passes.decode_linear import Linears


def decode(trace: Trace, runs: Callable[[torch.device], bool]) -> Trace:
    """Linear layers and attention over few rows, as operators that read their weights and caches once."""
    types = [v.type for v in (*trace.inputs, *trace.constants)]
    if not any(runs(device) for device in {t.device for t in types if isinstance(t, TensorType)}):
        return trace
    trace = Attention(trace, runs).run()
    return Linears(trace, runs).run()
