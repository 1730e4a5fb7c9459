"""The switches of PyTorch that a program may leave changed: how they stand, and how to put them back."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch.autograd import forward_ad


def switches() -> dict[str, object]:
    """Each by its name, as it stands now."""
    devices = ("cpu", "cuda")
    return {
        "grad mode": torch.is_grad_enabled(),
        "forward mode": torch._C._is_fwd_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "dual level": (forward_ad._current_level, _dual_level_open()),
        "levels of torch.func": torch._C._functorch.get_dynamic_layer_stack_depth(),
        "requires_grad_ under torch.func": torch._C._functorch.get_inplace_requires_grad_allowed(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "keys included": str(torch._C._dispatch_tls_local_include_set()),
        "keys excluded": str(torch._C._dispatch_tls_local_exclude_set()),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default dtype": torch.get_default_dtype(),
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "hooks on all saved tensors": _saved_tensors_are_hooked(),
        "attention": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
    }


def reset_switches() -> None:
    """Grad mode, forward mode and torch.func as Python starts with them, whatever a program that raised has left."""
    torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(0)
    torch._C._functorch.set_inplace_requires_grad_allowed(False)
    while forward_ad._current_level >= 0:
        forward_ad.exit_dual_level()
    with suppress(RuntimeError):  # Dynamo's graphs enter the level in C++ alone, where nothing tells whether it is open
        torch._C._exit_dual_level(level=0)
    torch._C._autograd._saved_tensors_hooks_enable()
    while _saved_tensors_are_hooked():  # a checkpoint whose function raised may leave its own
        torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._set_fwd_grad_enabled(True)
    torch.set_grad_enabled(True)


def _saved_tensors_are_hooked() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _dual_level_open() -> bool:
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:  # there is one level at a time
        return True
    torch._C._exit_dual_level(level=level)
    return False
