"""PyTorch's own samples of its operators, which its tests use. Importing this takes seconds, and wants numpy.

The modules behind it forbid to set flags of backends for the rest of the process when they are imported: not here.
"""

from __future__ import annotations

import torch

from tessera.torch_internals.lookup import symbol

_forbid, torch.backends.disable_global_flags = torch.backends.disable_global_flags, lambda: None
try:
    operators: list = symbol("torch.testing._internal.common_methods_invocations.op_db", "trying every operator")
    # Both hold a wrapper that seeds random operators.
    MODULES = (
        symbol("torch.testing._internal.common_methods_invocations", "trying every operator"),
        symbol("torch.testing._internal.opinfo.core", "trying every operator"),
    )
finally:
    torch.backends.disable_global_flags = _forbid
