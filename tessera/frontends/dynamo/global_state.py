"""Switches of PyTorch's that a program sets: what it does to them, it must do at every call.

Grad mode is followed: the recorder notes what runs without gradients or tangents, and `Captured.grad_after` says how
the program leaves the switch (`grad_mode.py`). So are the levels of `torch.func`'s transforms. Any other switch (the
default dtype, deterministic algorithms, the state of random numbers) decides what later operators compute, and no
equation says so: a graph that sets one runs eagerly, and a traced function that does is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tessera.frontends.functional.trace import WATCHED, tracing
from tessera.torch_internals.autograd import set_fwd_grad_enabled, set_grad_enabled
from tessera.torch_internals.functorch import SWITCHES
from tessera.torch_internals.operators import HigherOrderOperator, OpOverload, OpOverloadPacket
from tessera.util.errors import CaptureError
from tessera.util.names import names

_OPERATORS = (str, OpOverload, OpOverloadPacket, HigherOrderOperator)
_FOLLOWED = (set_grad_enabled, set_fwd_grad_enabled)
_SETTERS = ("set_", "_set_", "enable_", "use_")
# What Dynamo writes into a graph for a context that the program enters, by name.
_CONTEXTS = names(
    "_enter_autocast _exit_autocast _enter_inference_mode _exit_inference_mode _enter_dual_level _exit_dual_level "
    "_saved_tensors_hooks_disable _saved_tensors_hooks_enable _set_grad_enabled _set_fwd_grad_enabled "
    "set_inplace_requires_grad_allowed _backend_from_string _sdpa_kernel"
)


def refuse_setter(node: torch.fx.Node) -> None:
    """A node of Dynamo's that is called for nothing but the switch it sets."""
    target = node.target
    if node.users or node.all_input_nodes or isinstance(target, _OPERATORS):
        return
    name, ours = getattr(target, "__name__", ""), getattr(target, "__module__", "") == SWITCHES
    if name.startswith(_SETTERS) and not ours and target not in _FOLLOWED:
        raise CaptureError(f"the program calls {name}, on which later operators depend; the graph runs eagerly")


def leave_contexts(rest: Iterable[torch.fx.Node], env: dict[torch.fx.Node, object]) -> None:
    """The recording of a graph failed before `rest`: leave what it had entered, as the graph itself would.

    What `rest` enters and leaves again does no harm, so that nobody has to count.
    """
    for node in rest:
        known = all(n in env for n in node.all_input_nodes)
        if node.op == "call_function" and known and getattr(node.target, "__name__", "") in _CONTEXTS:
            args = torch.fx.map_arg(node.args, env.__getitem__)
            kwargs = torch.fx.map_arg(node.kwargs, env.__getitem__)
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]


def _refused(name: str) -> Callable[[Callable], Callable]:
    def replace(original: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            if tracing():
                raise CaptureError(
                    f"the function calls torch.{name}, which acts once, while the function is traced; call it outside, "
                    'or use frontend="dynamo"'
                )
            return original(*args, **kwargs)

        return call

    return replace


for _name in sorted(
    names("set_default_dtype use_deterministic_algorithms set_deterministic_debug_mode manual_seed seed set_rng_state")
):
    WATCHED.append((torch, _name, _refused(_name)))
