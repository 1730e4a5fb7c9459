"""StableHLO programs as functions over tensors: `load` one from a file, bytes, text or `jax.export`; `register` the
meaning of a `custom_call`; `from_jax` makes one of a JAX function."""

from tessera.stablehlo.jax import from_jax
from tessera.stablehlo.program import load, register

__all__ = ["from_jax", "load", "register"]
