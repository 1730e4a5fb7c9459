"""Executors: who runs what. Importing this folder registers those that come with Tessera."""

from tessera.executors import aten, attention, bags, inductor, sdpa, tile
from tessera.executors.base import FusionExecutor, OperatorExecutor
from tessera.executors.claim import Claim, claim
from tessera.executors.kernels import register_kernel
from tessera.executors.register import register_executor, register_operator
from tessera.executors.rows import executor as rows

__all__ = [
    "Claim", "FusionExecutor", "OperatorExecutor", "aten", "claim", "inductor", "register_executor",
    "attention", "bags", "register_kernel", "register_operator", "rows", "sdpa", "tile",
]  # fmt: skip
