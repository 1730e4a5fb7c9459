"""The executor `rows`: linear layers and attention over few rows, by kernels that read weights and caches once.

In: a functional program without gradients. `decode` rewrites it to the operators of `ops/rows`. In the final
program, where writes happen in place, `cached_attention` joins the writes to a cache with the attention that reads
them. Out: `claims` gives each of these operators its kernel. The kernels are Triton written by hand, not from tile
programs: they start before the kernel in front of them ends and choose among several weights, which the tile dialect
does not say.
"""

from __future__ import annotations

from collections.abc import Callable

from tessera.executors.base import OperatorExecutor, register
from tessera.executors.claim import claim_operators
from tessera.executors.rows.patterns.attention import Attention
from tessera.executors.rows.patterns.cached_attention import joined
from tessera.executors.rows.patterns.linear import Linears
from tessera.ir.equation import Equation
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops import quantized
from tessera.ops.rows import limits
from tessera.ops.rows.launch import kernel
from tessera.ops.rows.operators import OPERATORS
from tessera.torch_internals.operators import op_name

_WHY = {
    "rows_linear": "weights read once",
    "quantized_linear": "weights read once, as they are stored",
    "cache_write": "one row of every sequence",
}


def decode(trace: Trace) -> Trace:
    """Linear layers and attention over few rows, as operators that read their weights and caches once."""
    types = [v.type for v in (*trace.inputs, *trace.constants)]
    if not any(limits.runs(device) for device in {t.device for t in types if isinstance(t, TensorType)}):
        return trace
    return Linears(Attention(trace).run()).run()


def cached_attention(trace: Trace) -> Trace:
    """Attention that writes what is new in its caches; it, and the writes that are left, have our kernels."""
    return claim_operators(joined(trace), ROWS, [])


def claims(eqn: Equation) -> Callable | None:
    op = eqn.op
    if op not in OPERATORS and op is not quantized.LINEAR:
        return None
    x = eqn.inputs()[0].tensor
    if not limits.runs(x.device):
        return None
    if op is quantized.LINEAR and not limits.few_rows(x):
        return None
    has_kernels = x.device.type == "cuda" or limits.interpreted()
    return kernel(op_name(op)) if has_kernels else OPERATORS.get(op, quantized.quantized_linear)


def why(eqn: Equation) -> str:
    return _WHY.get(op_name(eqn.op), "one query a head over a cache, split")  # type: ignore[union-attr]


ROWS = OperatorExecutor(
    "rows", claims, why=why, rewrite=(("decode", decode),), finish=(("cached_attention", cached_attention),)
)
register(ROWS)
