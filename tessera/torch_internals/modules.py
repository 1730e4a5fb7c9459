"""What modules and optimizers keep under private names: hooks, buffers, counters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn.modules import module as every_module
from torch.optim import optimizer as every_optimizer

from tessera.torch_internals.lookup import symbol

# The dictionaries of a module's hooks, by kind; a hook for all modules is in the one of the module `torch.nn.modules`.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
TABLES = ("_parameters", "_buffers", "_modules")  # what a module holds, by name
# What a module keeps for saving and loading, and what further says of hooks; no forward reads it.
IGNORED = frozenset(
    (
        "_non_persistent_buffers_set", "_is_full_backward_hook", "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    )
)  # fmt: skip
_global_hooks = tuple(f"_global{kind}" for kind in HOOKS)
Dropout = symbol("torch.nn.modules.dropout._DropoutNd", "trying models without dropout")


def hooks_of(module: torch.nn.Module) -> dict[str, dict]:
    return {kind: getattr(module, kind, {}) for kind in HOOKS}


def hooks_of_all_modules() -> dict[str, dict]:
    """Those of `register_module_forward_hook` and its like."""
    return {kind: getattr(every_module, kind) for kind in _global_hooks}


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The dictionary itself: the module's own buffers, without those of modules in it."""
    return module._buffers


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Something is to run before or after `step`, of this optimizer or of all."""
    return any(
        (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            every_optimizer._global_optimizer_pre_hooks,
            every_optimizer._global_optimizer_post_hooks,
        )
    )


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Schedulers ask whether a step came before theirs."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


@contextmanager
def without_hooks_of(model: torch.nn.Module, package: str) -> Iterator[None]:
    """Forward hooks that a package of PyTorch's own has hung on a model do not run meanwhile."""
    before = [(module, kind, getattr(module, kind)) for module in model.modules() for kind in HOOKS[:2]]
    try:
        for module, kind, hooks in before:
            kept = [(key, fn) for key, fn in hooks.items() if not _module_of(fn).startswith(package)]
            if len(kept) < len(hooks):
                setattr(module, kind, OrderedDict(kept))
        yield
    finally:
        for module, kind, hooks in before:
            setattr(module, kind, hooks)


def _module_of(fn: object) -> str:
    plain = fn.func if isinstance(fn, partial) else fn
    return str(getattr(plain, "__module__", ""))
