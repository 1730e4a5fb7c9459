"""The operators of StableHLO and CHLO, one file a family; importing this package fills the table of meanings."""

from tessera.frontends.stablehlo.operators import (
    arithmetic,
    bits,
    chlo,
    collectives,
    compare,
    control,
    convert,
    convolution,
    custom_calls,
    functions,
    indexing,
    linear_algebra,
    open_calls,
    products,
    quantization,
    random,
    reductions,
    shapes,
    sorting,
    windows,
)

__all__ = [
    "arithmetic", "bits", "chlo", "collectives", "compare", "control", "convert", "convolution",
    "custom_calls", "functions", "indexing", "linear_algebra", "open_calls", "products", "quantization", "random",
    "reductions", "shapes", "sorting", "windows",
]  # fmt: skip
