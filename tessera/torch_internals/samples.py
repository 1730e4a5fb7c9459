"""PyTorch's own samples of its operators, which its tests use. Importing this takes seconds, and wants numpy."""

from __future__ import annotations

from tessera.torch_internals.lookup import symbol

operators: list = symbol("torch.testing._internal.common_methods_invocations.op_db", "trying every operator")
# Both hold a wrapper that seeds random operators.
MODULES = (
    symbol("torch.testing._internal.common_methods_invocations", "trying every operator"),
    symbol("torch.testing._internal.opinfo.core", "trying every operator"),
)
