"""Sharding rules of operators, by family. Importing this folder registers them."""

from tessera.ops.factors import (  # noqa: F401
    attention,
    creation,
    experts,
    images,
    indexing,
    losses,
    norms,
    pointwise,
    products,
    reductions,
    views,
)
from tessera.ops.factors.rule import DECOMPOSED, FACTORS

__all__ = ["DECOMPOSED", "FACTORS"]
