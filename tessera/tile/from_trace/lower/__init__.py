"""How operators of a trace are lowered, by family. Importing a family puts its rules into the table of `rule`."""

from tessera.tile.from_trace.lower import activation, gather, pointwise, pool, product, random, reduce, view

__all__ = ["activation", "gather", "pointwise", "pool", "product", "random", "reduce", "view"]
