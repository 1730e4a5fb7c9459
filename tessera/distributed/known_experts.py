"""Experts of Hugging Face's models, as `tessera.experts`.

In: a model. Out: while it is captured, modules that hold experts' matrices as Mixtral, Qwen3-MoE and DeepSeek do call
`tessera.experts` with them. Such a module is known by what it has: two stacks of matrices without biases, an activation
of a kind that is known, and a call with tokens, choices and weights. Its own loop over the experts that some token
chose depends on values, which no program over whole tensors can do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.ops.experts import experts

PLAIN_GATE = "_default_apply_gate"  # of a class that has no gate of its own: act_fn(gate) * up
CALL = ["hidden_states", "top_k_index", "top_k_weights"]
PROBE = torch.tensor([-2.0, -0.5, 0.1, 3.0])
KINDS = {
    "silu": F.silu(PROBE),
    "gelu": F.gelu(PROBE),
    "gelu_tanh": F.gelu(PROBE, approximate="tanh"),
    "relu": F.relu(PROBE),
}


@contextmanager
def known_experts(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for module in model.modules():
            activation = _activation(module)
            if activation is not None:
                object.__setattr__(module, "forward", partial(_call, module, activation))
                stack.callback(object.__delattr__, module, "forward")
        yield


def _activation(module: nn.Module) -> str | None:
    """The activation of a module that is known; None of others."""
    up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(up, nn.Parameter) or not isinstance(down, nn.Parameter) or "forward" in vars(module):
        return None
    if {name for name, _ in module.named_parameters(recurse=False)} != {"gate_up_proj", "down_proj"}:
        return None
    if up.ndim != 3 or tuple(down.shape) != (up.shape[0], up.shape[2], up.shape[1] // 2):
        return None
    if getattr(module, "is_transposed", False) or not getattr(module, "has_gate", True):
        return None
    gate = getattr(type(module), "_apply_gate", None)
    if gate is not None and gate.__name__ != PLAIN_GATE:
        return None
    if list(inspect.signature(type(module).forward).parameters)[1:] != CALL:
        return None
    act = getattr(module, "act_fn", None)
    if not callable(act):
        return None
    with torch.no_grad():
        seen = act(PROBE)
    return next((name for name, y in KINDS.items() if isinstance(seen, Tensor) and torch.equal(seen, y)), None)


def _call(
    module: nn.Module, activation: str, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    gate, up = module.gate_up_proj.chunk(2, 1)  # type: ignore[operator, union-attr]
    down = module.down_proj
    assert isinstance(down, Tensor)
    return experts(hidden_states, top_k_index, top_k_weights, up, down, gate, activation=activation)
