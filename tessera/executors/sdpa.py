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
from tessera.torch_internals.fake import unset_fake_temporarily
from tessera.torch_internals.operators import aten_name, fused_sdp_choice, sdp_priority_order

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
    if aten_name(eqn.op) != NAME:
        return None
    return torch.nn.functional.scaled_dot_product_attention


def backend(eqn: Equation) -> str:
    """The kernel eager PyTorch would choose for this call, in words."""
    positional, keyword = eqn.bound()
    query, key, value, mask, dropout, causal = positional[:6]
    tensors = (query, key, value, mask)
    try:
        if query.tensor.device.type == "cuda":
            return _TOLD[_on_cuda(tensors, dropout, causal, bool(keyword.get("enable_gqa", False)))]
        options = {name: keyword[name] for name in ("scale", "enable_gqa") if name in keyword}
        real = map_values(tensors, _empty)  # the choice looks at shapes and strides, never at the numbers
        return _TOLD[SDPBackend(fused_sdp_choice(*real, dropout, causal, **options))]  # type: ignore[misc]
    except Exception as error:  # symbolic sizes, or a device that is not here
        return f"chosen at the call ({type(error).__name__})"


def _on_cuda(tensors: tuple, dropout: float, causal: bool, gqa: bool) -> SDPBackend:
    """The first backend in PyTorch's order of preference that takes these arguments."""
    fakes = map_values(tensors, lambda v: fake.fake_of(v.tensor, fake.default_mode()))
    params = torch.backends.cuda.SDPAParams(*fakes, dropout, causal, gqa)  # type: ignore[misc]
    usable = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.can_use_flash_attention,
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.can_use_efficient_attention,
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
    }
    for number in sdp_priority_order():
        choice = SDPBackend(number)
        if choice in usable and usable[choice](params):
            return choice
    return SDPBackend.MATH


def _empty(v: Value) -> torch.Tensor:
    t = v.tensor
    with unset_fake_temporarily():
        return torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=t.device)


register(OperatorExecutor("sdpa", claims, why=backend))
