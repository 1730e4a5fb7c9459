"""How operators of a trace are lowered, by family. Importing this folder registers them."""

from tessera.tile.from_trace.lower import (  # noqa: F401
    activation,
    average_pool,
    gather,
    pointwise,
    pool,
    product,
    random,
    reduce,
    view,
)
