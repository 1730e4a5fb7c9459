"""`from_jax`: a JAX function as a function over tensors. In: the function and example arguments. Out: what `load`
gives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from tessera.frontends.stablehlo.bindings import MissingExtraError
from tessera.frontends.stablehlo.registry import CUSTOM_CALLS
from tessera.stablehlo.program import load


def from_jax(fn: Callable, /, *args: object, executors: str | list[str] | None = None, **kwargs: object) -> Callable:
    """A function that computes on tensors what `fn` does on JAX's arrays, for arguments of these shapes and types.

    Arguments are JAX's arrays, `jax.ShapeDtypeStruct`s (whose sizes may be symbols of `jax.export.symbolic_shape`),
    NumPy's arrays or tensors, in any structure that JAX takes. What `jax.grad` wrote comes along.
    """
    try:
        jax = importlib.import_module("jax")
        export = importlib.import_module("jax.export")
    except ImportError as error:
        raise MissingExtraError("from_jax needs jax, which is not installed; pip install jax") from error
    given = jax.tree_util.tree_map(lambda x: _described(x, jax), (args, kwargs))
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in CUSTOM_CALLS]
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    exported = export.export(jitted, platforms=["cpu"], disabled_checks=checks)(*given[0], **given[1])
    return load(exported, executors=executors)


def _described(x: object, jax: Any) -> object:
    """A tensor as JAX describes arrays."""
    if not isinstance(x, torch.Tensor):
        return x
    name = str(x.dtype).removeprefix("torch.")
    return jax.ShapeDtypeStruct(tuple(x.shape), jax.numpy.dtype(name if name != "bool" else "bool_"))
