"""The dispatcher: keys that a thread includes or excludes, and modes that stand above operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tessera.torch_internals.lookup import symbol

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = symbol("torch.utils._python_dispatch.TorchDispatchMode", "recording programs")

_MODES = "recording, which other dispatch modes must not see"
DispatchKey = symbol("torch._C.DispatchKey", "telling whether autograd is at work")
parse_key: Callable[[str], Any] = symbol("torch._C._parse_dispatch_key", "telling whether autograd batches gradients")
is_key_included: Callable[[Any], bool] = symbol(
    "torch._C._dispatch_tls_is_dispatch_key_included", "telling whether autograd batches gradients"
)
is_key_excluded: Callable[[Any], bool] = symbol(
    "torch._C._dispatch_tls_is_dispatch_key_excluded", "telling whether autograd is at work"
)
included_keys = symbol("torch._C._dispatch_tls_local_include_set", "tracing inside a program that is being recorded")
excluded_keys = symbol("torch._C._dispatch_tls_local_exclude_set", "tracing inside a program that is being recorded")
ForceKeys = symbol("torch._C._ForceDispatchKeyGuard", "tracing inside a program that is being recorded")
# Context managers. The second stands below the kernels that note views and versions as well.
BelowAutograd = symbol("torch._C._AutoDispatchBelowAutograd", "recording operators whole, before autograd")
BelowADInplaceOrView = symbol("torch._C._AutoDispatchBelowADInplaceOrView", "running compiled programs")
DisableAutocast = symbol("torch._C._DisableAutocast", "running a program whose casts are written in it")
DisableTorchDispatch = symbol("torch._C._DisableTorchDispatch", "looking at a constant while a program is recorded")
is_any_autocast_enabled: Callable[[], bool] = symbol(
    "torch._C._is_any_autocast_enabled", "the key under which a transformed function is kept"
)
enable_python_dispatcher = symbol("torch._dispatch.python.enable_python_dispatcher", "type rules over symbolic sizes")
no_python_dispatcher = symbol("torch._dispatch.python.no_python_dispatcher", "asking PyTorch's own rule of views")
disable_current_modes = symbol("torch.utils._python_dispatch._disable_current_modes", _MODES)
dispatch_mode: Callable[[Any], Any] = symbol("torch._C._get_dispatch_mode", "telling whether fake tensors are in use")
ModeKey = symbol("torch._C._TorchDispatchModeKey", "telling whether fake tensors are in use")
is_traceable_wrapper_subclass: Callable[[object], bool] = symbol(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", "refusing tensor subclasses by name"
)
