"""Tessera's own operators, by the files that bring them: a program imports those that it calls.

None of these files needs the compiler.
"""

from __future__ import annotations

import importlib

from tessera.ir.strides import LAID_OUT  # noqa: F401  (almost every program calls it)

SPECIALS = {
    "check": "tessera.ir.check",
    "raise_if": "tessera.ir.check",
    "functional": "tessera.ir.alias",
    "functional_over": "tessera.ir.alias",
    "keep_grad": "tessera.ir.alias",
    "call": "tessera.ir.call",
    "checkpoint": "tessera.ir.call",
    "cond": "tessera.ops.control",
    "while_loop": "tessera.ops.control",
    "scan": "tessera.ops.control",
    "batch_norm": "tessera.ops.norm_backward",
    "attention_math": "tessera.ops.attention",
    "linear_cross_entropy": "tessera.ops.chunked_loss",
    "linear_loss": "tessera.ops.linear_loss",
    "masked_read": "tessera.ops.index",
    "class_logit": "tessera.passes.decompose.loss",
}
OVERLOADS = {
    "quantized_linear": "tessera.ops.rows.launch",  # which has a kernel for few rows
    "rows_linear": "tessera.ops.rows.launch",
    "bag_sum": "tessera.ops.bags",
    "grouped_mm": "tessera.ops.grouped",
    "uniform": "tessera.ops.uniform",
    "max_pool": "tessera.ops.pool",
    "max_pool_backward": "tessera.ops.pool",
    "avg_pool_backward": "tessera.ops.average_pool",
}


def bring(tables: dict) -> None:
    """Import what registers the operators of these tables, which have been checked."""
    for row in tables["ops"]:
        if row[0] == "special" and row[1] in SPECIALS:
            importlib.import_module(SPECIALS[row[1]])
        of = row[4] if row[0] == "of" else row
        if of[0] == "op" and of[1] == "tessera" and of[2] in OVERLOADS:
            importlib.import_module(OVERLOADS[of[2]])
