"""Levels of torch.func's transforms, and the older vmap by which autograd batches gradients (`is_grads_batched`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.torch_internals.lookup import symbol

_LEVELS = "graphs that enter levels of torch.func's transforms"
_BATCHED = "gradients with is_grads_batched"
HOME = "torch._functorch"  # how Dynamo's guards on its state begin
SWITCHES = "torch._C._functorch"  # the module of the functions by which its transforms set their switches
functorch_interpreters: Callable[[], list] = symbol(
    "torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters", "telling whether torch.func is at work"
)
level_count: Callable[[], int] = symbol("torch._C._functorch.get_dynamic_layer_stack_depth", _LEVELS)
_top_level = symbol("torch._C._functorch.peek_interpreter_stack", _LEVELS)
_LEAVE = {
    kind: symbol(f"torch._C._functorch._{name}_decrement_nesting", _LEVELS)
    for kind, name in {"Vmap": "vmap", "Grad": "grad", "Jvp": "jvp", "Functionalize": "func"}.items()
}
is_functorch_wrapped: Callable[[torch.Tensor], bool] = symbol(
    "torch._C._functorch.is_functorch_wrapped_tensor", "tensors under torch.func"
)
_get_unwrapped: Callable[[torch.Tensor], torch.Tensor] = symbol("torch._C._functorch.get_unwrapped", _LEVELS)
VmapInfo = symbol("torch._functorch.autograd_function.VmapInfo", "functions that bring a vmap rule of their own")
config = symbol("torch._functorch.config", "timing a backward twice")

is_legacy_batched: Callable[[torch.Tensor], bool] = symbol("torch._C._functorch.is_legacy_batchedtensor", _BATCHED)
vmap_level_up: Callable[[], int] = symbol("torch._C._vmapmode_increment_nesting", _BATCHED)
vmap_level_down: Callable[[], int] = symbol("torch._C._vmapmode_decrement_nesting", _BATCHED)
add_batch_dim = symbol("torch._add_batch_dim", _BATCHED)
remove_batch_dim = symbol("torch._remove_batch_dim", _BATCHED)


def pop_levels(depth: int) -> None:
    """Leave the innermost levels until `depth` are left. torch 2.11's own function for it only knows those of vmap."""
    while level_count() > depth:
        _LEAVE[_top_level().key().name]()


def innermost(x: torch.Tensor) -> torch.Tensor:
    """The tensor that the levels of torch.func have wrapped, which alone has memory; `x` itself outside of all."""
    while is_functorch_wrapped(x):
        x = _get_unwrapped(x)
    return x
