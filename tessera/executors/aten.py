"""The executor of everything nobody else claims: PyTorch's own kernels.

In: an operator of a trace. Out: the callable with the same semantics that costs the host least (`ir/binding.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tessera.executors.attention_backward import adapted
from tessera.executors.base import OperatorExecutor, register
from tessera.ir.binding import quick
from tessera.ir.equation import Operator, Special
from tessera.torch_internals.operators import OpOverload


def bind(op: Operator) -> Callable:
    """The fastest callable that means exactly this operator, for arguments as a trace spells them."""
    return op.fn if isinstance(op, Special) else _bind(op)


@functools.cache
def _bind(op: OpOverload) -> Callable:
    return adapted(op) or quick(op)


# Named in lists of executors; it claims nothing, because what is left over is its own.
register(OperatorExecutor("aten", lambda eqn: None))
