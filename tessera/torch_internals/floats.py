"""Floats that belong to a module or to code, as TorchDynamo traces them where sizes are symbols.

With `dynamic=True` Dynamo makes an input of every float that it meets, as if it changed from call to call: the eps of
every norm, `math.pi`. Kernels could not be made for their values, and every call would wrap them all in tensors. After
`keep_floats` they are constants with a guard, as without `dynamic=True`; one that was seen to change becomes an input.
"""

from __future__ import annotations

import functools
from typing import Any

import torch._dynamo.config

from tessera.torch_internals.lookup import missing, symbol
from tessera.torch_internals.tracing import backend_of

_WHY = "constants of modules where sizes are symbols"
_Builder = symbol("torch._dynamo.variables.builder.VariableBuilder", _WHY)
_GuardSource = symbol("torch._guards.GuardSource", _WHY)


def keep_floats(kind: type) -> None:
    """From now on, for all that Dynamo traces for backends of this kind."""
    if missing(_Builder) or missing(_GuardSource) or hasattr(_Builder.wrap_symfloat, "keeps"):
        return
    theirs = _Builder.wrap_symfloat

    @functools.wraps(theirs)
    def wrap_symfloat(self: Any, value: float) -> Any:
        if not isinstance(backend_of(self.tx.output), kind) or not _belongs(self.get_source()):
            return theirs(self, value)
        with torch._dynamo.config.patch(assume_static_by_default=True):
            return theirs(self, value)

    wrap_symfloat.keeps = True  # type: ignore[attr-defined]
    _Builder.wrap_symfloat = wrap_symfloat


def _belongs(source: Any) -> bool:
    """An attribute of a module, or a global name; what is passed to a call belongs to nobody."""
    where = source.guard_source
    where = where() if callable(where) else where  # until PyTorch 2.11
    return where is _GuardSource.GLOBAL or where.is_unspecialized_nn_module()
