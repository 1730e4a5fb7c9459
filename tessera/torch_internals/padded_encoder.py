"""`nn.TransformerEncoder` in inference, with padding: captured, it leaves at padded places what eager leaves there.

Eager computes on nested tensors, so padded places of the result are zeros, behind `norm` what that makes of zeros.
While Dynamo traces or `torch.export` captures, `forward` takes another way, without nested tensors, and computes
something at these places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tessera.torch_internals.frames import with_own_code
from tessera.torch_internals.lookup import owner_of, symbol

_WHY = "padded places in nn.TransformerEncoder"
translator = owner_of("torch._dynamo.symbolic_convert.InstructionTranslatorBase.inline_user_function_return", _WHY)
_function = symbol("torch._dynamo.variables.UserFunctionVariable", _WHY)

_theirs = nn.TransformerEncoder.forward
_plain = with_own_code(_theirs)  # it is known by its code: called from here, it is entered as it is


def with_padding(inline: Callable) -> Callable:
    """Where Dynamo enters the encoder's `forward`, it enters the function below."""

    def inline_user_function_return(self: Any, fn: Any, args: list, *rest: Any, **options: Any) -> object:
        if fn.get_code() is _theirs.__code__:
            return inline(self, _function(_forward), [*fn.self_args(), *args], *rest, **options)
        return inline(self, fn, args, *rest, **options)

    return inline_user_function_return


def _forward(
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    nests = torch.backends.mha.get_fastpath_enabled() and _nests(encoder, src)
    return _padded(encoder, src, mask, src_key_padding_mask, is_causal, nests)


def _padded(
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None,
    src_key_padding_mask: Tensor | None,
    is_causal: bool | None,
    nests: bool,
) -> Tensor:
    result = _plain(encoder, src, mask, src_key_padding_mask, is_causal)
    if src_key_padding_mask is None or mask is not None or not nests:
        return result
    padded = src_key_padding_mask != 0
    places = torch.arange(padded.shape[1], device=padded.device)
    in_front = (padded == (places >= (~padded).sum(1, keepdim=True))).all()  # else eager does not nest either
    nothing = src.new_zeros(1, 1, src.shape[2])
    if encoder.norm is not None:
        nothing = encoder.norm(nothing)
    return torch.where((padded & in_front).unsqueeze(-1), nothing, result)


@contextmanager
def exported_encoders() -> Iterator[None]:
    """While inside, layers of encoders run by operators that have rules, not by one that is a whole layer in inference,
    and encoders leave at padded places what they leave outside."""
    fast = torch.backends.mha.get_fastpath_enabled()

    def forward(
        self: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        return _padded(self, src, mask, src_key_padding_mask, is_causal, fast and _nests(self, src))

    nn.TransformerEncoder.forward = forward
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        nn.TransformerEncoder.forward = _theirs
        torch.backends.mha.set_fastpath_enabled(fast)


def _nests(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Whether eager computes on nested tensors, if the padding stands behind; where nobody asks for that check, so does
    Dynamo's graph."""
    layer = encoder.layers[0]
    if not (encoder.use_nested_tensor and encoder.mask_check):
        return False
    if layer.training or src.dim() != 3 or torch.is_autocast_enabled():
        return False
    tensors = (src, *layer.self_attn.parameters(), *layer.norm1.parameters(), *layer.norm2.parameters(),
               *layer.linear1.parameters(), *layer.linear2.parameters())  # fmt: skip
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
