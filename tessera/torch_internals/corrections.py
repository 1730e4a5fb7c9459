"""What TorchDynamo gets wrong, put right for all that it compiles in this process.

In: nothing. Out: after `correct_dynamo`, code that Dynamo makes gives what eager does in the cases below. Each
correction only makes Dynamo do more where it would have left something out; that is right for every backend. Dynamo
goes wrong while it traces, before a backend sees a graph, so nothing can be done there. It is also spared work that
only its logs read, where they are off: together 3 % of the time of a small program's first call.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from tessera.torch_internals.dynamo import config, guard_same_objects
from tessera.torch_internals.lookup import VERSION, owner_of, symbol
from tessera.torch_internals.padded_encoder import translator, with_padding

_WHY = "gradients of an autograd.Function under Dynamo"
_function = owner_of("torch._dynamo.variables.misc.AutogradFunctionVariable.call_apply", _WHY)
_context = owner_of("torch._dynamo.variables.misc.AutogradFunctionContextVariable.call_method", _WHY)
_tensor = owner_of(
    "torch._dynamo.variables.tensor.TensorVariable.method_attr_requires_grad", "gradients that torch.func asks for"
)
_hooks = owner_of("torch._dynamo.variables.tensor.TensorVariable._method_register_hook", "hooks set in a forward")
_unimplemented = symbol("torch._dynamo.exc.unimplemented", _WHY)
_guards = owner_of(
    "torch._dynamo.guards.GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT", "modules of one class, of which some have hooks"
)

_effects = owner_of("torch._dynamo.side_effects.SideEffects.codegen_hooks", "hooks on arguments that a graph writes")
_SPARED = "work that only a log of Dynamo's reads"
_names = owner_of("torch._dynamo.symbolic_convert.get_funcname", _SPARED)
_latency = owner_of("torch._dynamo.guards.profile_guard_manager", _SPARED)
_trace_log = symbol("torch._dynamo.symbolic_convert.trace_call_log", _SPARED)
_source_log = symbol("torch._dynamo.symbolic_convert.trace_source_log", _SPARED)
_guards_log = symbol("torch._dynamo.guards.guards_log", _SPARED)


def correct_dynamo() -> None:
    guard_same_objects()
    if VERSION < (2, 12):  # it takes a tensor that a module still holds for unchanged: it may require gradients by now
        config.skip_tensor_guards_with_matching_dict_tags = False
    _replace(_function, "call_apply", _with_different_arguments)
    _replace(_tensor, "method_attr_requires_grad", _with_transforms)
    if VERSION < (2, 13):
        _replace(_hooks, "_method_register_hook", _with_hooks_outside)
    _replace(_context, "call_method", _with_fixed_results)
    _replace(_guards, "EMPTY_NN_MODULE_HOOKS_DICT", _with_hooks_of_arguments)
    _replace(_effects, "codegen_hooks", _with_hooks_before_writes)
    # It takes every file that it traces apart to name functions, and times guards after it has emptied the caches.
    _replace(_names, "get_funcname", _if_logged(None, _trace_log, _source_log))
    _replace(_latency, "profile_guard_manager", _if_logged(0.0, _guards_log))
    _replace(translator, "inline_user_function_return", with_padding)


def _replace(owner: Any, name: str, correct: Callable[[Callable], Callable]) -> None:
    theirs = getattr(owner, name)
    if not hasattr(theirs, "__wrapped__"):
        setattr(owner, name, functools.wraps(theirs)(correct(theirs)))


def _if_logged(otherwise: object, *logs: logging.Logger) -> Callable[[Callable], Callable]:
    """Where nobody reads the logs, a word or a number instead of what is only logged."""

    def spared(theirs: Callable) -> Callable:
        def call(*args: object) -> object:
            return theirs(*args) if any(log.isEnabledFor(logging.DEBUG) for log in logs) else otherwise

        return call

    return spared


def _with_different_arguments(apply: Callable) -> Callable:
    """`Function.apply(x, x)`: Dynamo keeps one gradient for each tensor, so the second of two is lost; from 2.12 on it
    ends the graph there. A view of the tensor, in its second place, has a gradient of its own."""

    def call_apply(self: Any, tx: Any, args: list, kwargs: dict) -> object:
        if VERSION < (2, 12) and _marks_dirty(self.fn_cls):
            _unimplemented(
                gb_type="an autograd.Function that marks arguments dirty",
                context=f"call_apply {self}",
                explanation="This version of TorchDynamo would lose the history of an argument that it wrote.",
                hints=["The function runs eagerly; from PyTorch 2.12 on it does not."],
            )
        if torch.is_grad_enabled():
            seen: list[object] = []
            args = [_different(tx, x, seen) for x in args]
        return apply(self, tx, args, kwargs)

    return call_apply


def _marks_dirty(function: Any) -> bool:
    codes = (getattr(method, "__code__", None) for method in (function.forward, function.setup_context))
    return any("mark_dirty" in code.co_names for code in codes if code is not None)


def _different(tx: Any, x: Any, seen: list[object]) -> object:
    x = x.realize()
    if not x.is_tensor():
        return x
    value = _refreshed(x)
    if any(value is other for other in seen):
        return x.call_method(tx, "view_as", [x], {})
    seen.append(value)
    return x


def _with_hooks_outside(register: Callable) -> Callable:
    """A hook on what the program computes: before 2.13 Dynamo loses it under no_grad and in bodies of operators,
    and moves what it closes over before its maker. The graph ends there, and the hook is set on a tensor."""

    def _method_register_hook(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> object:
        if self.source is None:
            _unimplemented(
                gb_type="a hook on a tensor that the program computes",
                context=f"{name} {self}",
                explanation="This version of TorchDynamo does not always keep such a hook.",
                hints=["PyTorch 2.13 compiles it with the program."],
            )
        return register(self, tx, name, *args, **kwargs)

    return _method_register_hook


def _with_transforms(read: Callable) -> Callable:
    """What a transform of torch.func differentiates requires gradients from then on; Dynamo says what it did before. A
    function applied to it would lose its own derivative, too."""

    def method_attr_requires_grad(self: Any, tx: Any) -> object:
        _refreshed(self)
        return read(self, tx)

    return method_attr_requires_grad


def _refreshed(x: Any) -> torch.Tensor:
    """What stands for a tensor while it is traced, whose own word counts."""
    value = x.as_proxy().node.meta["example_value"]
    if isinstance(value, torch.Tensor) and value.requires_grad:
        x.requires_grad = True
    return value


def _with_fixed_results(method: Callable) -> Callable:
    """`ctx.mark_non_differentiable` in a forward that autograd itself calls, since the graph ended at `apply`: Dynamo
    notes it nowhere, and the result requires gradients. Such a forward runs as it is."""

    def call_method(self: Any, tx: Any, name: str, args: list, kwargs: dict) -> object:
        if name == "mark_non_differentiable" and not self.inference:
            _unimplemented(
                gb_type="mark_non_differentiable outside of autograd.Function.apply",
                context=f"call_method {self} {name}",
                explanation="TorchDynamo would forget which results have no gradient.",
                hints=["The forward of this autograd.Function runs eagerly."],
                skip_frame=True,
            )
        return method(self, tx, name, args, kwargs)

    return call_method


def _with_hooks_of_arguments(guard_empty: Callable) -> Callable:
    """A frame that is given its module is entered for others of its class too: those with hooks need code of their own.
    Dynamo takes it that hooks never change. Where the module is a global, as in a model's own frame, Tessera looks."""

    def guard(self: Any, guard: Any) -> None:
        name = guard.name() if callable(guard.name) else guard.name
        arrives = name.startswith("L[") and RemovableHandle.next_id > 0
        with config.patch(skip_nnmodule_hook_guards=False) if arrives else nullcontext():
            guard_empty(self, guard)

    return guard


def _with_hooks_before_writes(codegen_hooks: Callable) -> Callable:
    """Dynamo sets hooks on arguments behind the graph. If the graph writes one of those, that is another history than
    the one it had, and its results do not lead through it: a frame that does both runs as it is. Where only the memory
    of a view is written, its history is out of date, and PyTorch crashes at its first hook; reading `grad_fn` brings it
    up to date."""

    def codegen(self: Any, cg: Any) -> None:
        for tensor, *_ in self.tensor_hooks.values():
            if _gets_another_history(tensor.as_proxy().node.meta["example_value"]):
                _unimplemented(
                    gb_type="a hook on an argument that the graph writes",
                    context=str(tensor.source),
                    explanation="TorchDynamo would set the hook on what the argument is after it was written.",
                    hints=["Set the hook on a copy of the argument, or write a copy."],
                    skip_frame=True,
                )
            cg(tensor)
            cg.extend_output([cg.create_load_attr("grad_fn")])
            cg.pop_top()
        codegen_hooks(self, cg)

    return codegen


def _gets_another_history(example: torch.Tensor) -> bool:
    """An argument of a graph was written in it. A leaf keeps its history: only no_grad can write it."""
    return example._version > 0 and not example.is_leaf
