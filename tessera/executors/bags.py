"""Sums of bags of rows on a GPU.

In: an equation `tessera.bag_sum`. Out: the launch of its kernel itself: what the dispatcher would look at is settled.
"""

from __future__ import annotations

from collections.abc import Callable

from tessera.executors.base import OperatorExecutor, register
from tessera.ir.equation import Equation
from tessera.ops.bags import BAG_SUM, launched
from tessera.ops.rows.limits import runs


def claims(eqn: Equation) -> Callable | None:
    return launched if eqn.op is BAG_SUM and runs(eqn.out.tensor.device) else None


def _why(_: Equation) -> str:
    return "rows of a bag read side by side, several ahead"


register(OperatorExecutor("bags", claims, why=_why))
