"""Autograd's engine: its switches, what it notes on tensors, and the classes behind tensors and functions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch

from tessera.torch_internals.lookup import symbol

# Dynamo's graphs call these two by name, so that they are looked for there too.
set_grad_enabled: Callable[[bool], None] = symbol("torch._C._set_grad_enabled", "grad mode as a program sets it")
set_fwd_grad_enabled: Callable[[bool], None] = symbol(
    "torch._C._set_fwd_grad_enabled", "forward-mode differentiation as a program sets it"
)
is_fwd_grad_enabled: Callable[[], bool] = symbol(
    "torch._C._is_fwd_grad_enabled", "forward-mode differentiation as a program sets it"
)
get_data_attr = symbol("torch._C._autograd._get_data_attr", "finding `.data` in Dynamo's graphs")
DelayedError = symbol("torch._C._functions.DelayedError", "refusing a second derivative where it is asked for")
# The class that Tensor is made of: its methods are eager's, whatever Tensor's own are replaced by.
TensorBase = symbol("torch._C.TensorBase", "methods of tensors, while those of Tensor are watched")
# The base of every user's Function, in whose `apply` each call ends.
SingleLevelFunction = symbol("torch.autograd.function._SingleLevelFunction", "functions with a derivative of their own")
BackwardState = symbol(
    "torch.fx.experimental._backward_state.BackwardState", "refusing graphs made for compiled autograd"
)

# How often a tensor was written.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
# Whether it is a view, of anything.
is_tensor_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view
# Views that conjugate or negate when they are read.
lazy_conj: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._conj
lazy_neg: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._neg_view


# The hooks that wait for the gradient of a tensor; None where there are none. Asked at every call of a graph.
tensor_hooks: Callable[[torch.Tensor], dict | None] = attrgetter("_backward_hooks")


_leaf_state = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_requires_grad = attrgetter("requires_grad")
_PlainGetters = symbol("torch._C.DisableTorchFunctionSubclass", "reading flags of DTensors at every call")


def leaf_states(leaves: Iterable[torch.Tensor], hooks: bool) -> list:
    """Do they require gradients, and with `hooks` those that wait for their own."""
    with _PlainGetters():
        return list(map(_leaf_state if hooks else _requires_grad, leaves))


def take_hooks(result: torch.Tensor, hooks: OrderedDict) -> None:
    """From now on hooks that are set on what a function just gave are put here, and called from here."""
    result._backward_hooks = hooks
    result.grad_fn._register_hook_dict(result)  # type: ignore[union-attr]  as `register_hook` does before the first one


def hooks_of(leaf: torch.Tensor) -> tuple[dict, dict]:
    """The hooks that wait for the gradient of this leaf, before and after it is accumulated."""
    return tensor_hooks(leaf) or {}, getattr(leaf, "_post_accumulate_grad_hooks", None) or {}


# The identity on what goes into a module with full backward hooks, and on what comes out.
ModuleEnds = symbol("torch.nn.modules._functions.BackwardHookFunction", "full backward hooks of modules")


def hooks_of_ends(node: Any) -> dict | None:
    """The hooks of such an identity's node; None where it is another one's."""
    if not isinstance(node, ModuleEnds._backward_cls):
        return None
    handle = node.register_hook(lambda *_: None)
    handle.remove()
    return handle.hooks_dict_ref()


ModuleHook = symbol("torch.utils.hooks.BackwardHook", "full backward hooks of modules")


def module_was_entered(hook: Callable) -> bool:
    """Whether a backward came to what the module of such a hook gave, and not yet to what it was given."""
    cells = (cell.cell_contents for cell in getattr(hook, "__closure__", None) or ())
    return any(isinstance(held, ModuleHook) and held.grad_outputs is not None for held in cells)


def has_hooks(leaf: torch.Tensor) -> bool:
    return any(hooks_of(leaf))


# What a node saved, in a form that is unpacked one by one, where this PyTorch can.
raw_saved: Callable[[Any], tuple] = attrgetter("_raw_saved_tensors")
SavedTensor = symbol("torch._C._autograd.SavedTensor", "gradients of some results, where another has been written")
unpacks_one_by_one = all(hasattr(SavedTensor, name) for name in ("unpack", "data"))

# A number of the backward that runs, and whether it comes to a node.
backward_in_progress: Callable[[], int] = symbol("torch._C._current_graph_task_id", "gradients of results by results")
is_reached: Callable[[Any], bool] = symbol("torch._C._will_engine_execute_node", "gradients of results by results")

# Of a node, which the context of a Function is: the shape, dtype and device of each result.
result_metadata: Callable[[Any], Any] = attrgetter("_input_metadata")
# `torch.autograd.forward_ad` keeps the level of the innermost `dual_level` under this name; it is -1 outside of all.
DUAL_LEVEL = "_current_level"
