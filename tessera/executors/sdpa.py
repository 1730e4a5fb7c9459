"""Scaled dot product attention, whole.

In: an equation `aten.scaled_dot_product_attention`. Out: PyTorch's own function, which picks flash, memory
efficient, cuDNN or plain attention for each call as eager does. `backend` says which it would pick.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend

from tessera.executors.base import OperatorExecutor, register
from tessera.ir import fake
from tessera.ir.equation import Equation, Value, map_values
from tessera.ir.schema import bind

NAME = "scaled_dot_product_attention"
_TOLD = {
    SDPBackend.FLASH_ATTENTION: "flash attention",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient attention",
    SDPBackend.CUDNN_ATTENTION: "cuDNN attention",
    SDPBackend.MATH: "plain attention: no fused kernel takes these arguments",
    SDPBackend.OVERRIDEABLE: "the device's own attention",
    SDPBackend.ERROR: "no backend takes these arguments",
}


def claims(eqn: Equation) -> Callable | None:
    if getattr(eqn.op, "_opname", "") != NAME:
        return None
    return torch.nn.functional.scaled_dot_product_attention


def backend(eqn: Equation) -> str:
    """The kernel eager PyTorch would choose for this call, in words."""
    positional, keyword = bind(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
    query, key, value, mask, dropout, causal = positional[:6]
    options = {name: keyword[name] for name in ("scale", "enable_gqa") if name in keyword}

    def concrete(v: Value) -> torch.Tensor:
        return fake.fake_of(v.tensor, fake.default_mode())

    try:
        tensors = map_values((query, key, value, mask), concrete)
        with fake.below_autograd():
            choice = torch._fused_sdp_choice(*tensors, dropout, causal, **options)  # type: ignore[misc,arg-type]
        return _TOLD.get(SDPBackend(choice), str(choice))
    except Exception as error:  # symbolic sizes, or a device that is not here: the choice is made at the call
        return f"chosen at the call ({type(error).__name__})"


register(OperatorExecutor("sdpa", claims, why=backend))
