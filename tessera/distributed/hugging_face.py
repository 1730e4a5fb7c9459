"""The word `hf` of a plan: a model of Hugging Face's transformers says itself how tensor parallelism splits it.

In: a model with a `tp_plan`, such as `model.layers.*.self_attn.q_proj: colwise`, and the axis with that word. Out: a
placement for every weight that the plan splits. Only where weights lie is read: what modules exchange follows from it.
Weights that no rank can have a part of in DTensor's words, such as the packed halves of experts' matrices, stay whole.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tessera.util.errors import OptionError

WORD = "hf"
FIRST = ("colwise", "colwise_rep", "colwise_gather_output", "embedding_rowwise")  # split along the first dimension
LAST = ("rowwise", "rowwise_rep", "rowwise_split_input", "embedding_colwise")  # along the last, biases whole
WHOLE = (
    "replicate", "replicated_with_grad_allreduce", "all_reduce", "sequence_parallel", "mla_kv_a_proj",
    "packed_colwise", "packed_rowwise", "moe_tp_experts", "moe_identity_expert",
)  # fmt: skip


def with_their_plan(model: nn.Module, mesh: DeviceMesh, plan: str | Mapping[str, object]) -> str | Mapping[str, object]:
    """A plan in which the placements that the model's own asks for stand by name; what the user names goes before."""
    axes = mesh.mesh_dim_names or ()
    words = dict.fromkeys(axes[:1], plan) if isinstance(plan, str) else plan
    asking = [axis for axis in axes if words.get(axis) == WORD]
    if not asking or (isinstance(plan, str) and len(axes) != 1):
        return plan
    if len(asking) > 1:
        raise OptionError(f"plan: expected one axis of {WORD}, got {asking[0]} and {asking[1]}")
    return {**_placements(model, asking[0], mesh.size(axes.index(asking[0]))), **words}


def _placements(model: nn.Module, axis: str, ranks: int) -> dict[str, str]:
    theirs = getattr(model, "tp_plan", None) or getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not theirs:
        raise OptionError(
            f"plan: {WORD} expects a model with a tp_plan, {type(model).__name__} has none; 'tensor' reads one off the "
            "program"
        )
    placements = {}
    for pattern, word in theirs.items():
        if word not in (*FIRST, *LAST, *WHOLE):
            raise OptionError(
                f"plan: the tp_plan of {type(model).__name__} says {word!r} of {pattern}; expected one of "
                f"{', '.join((*FIRST, *LAST, *WHOLE))}; name placements yourself beside the word 'tensor'"
            )
        for name, p in model.named_parameters():
            if fnmatch.fnmatch(name.rpartition(".")[0], pattern) and p.ndim <= 2:
                dim = 0 if word in FIRST else p.ndim - 1 if word in LAST and p.ndim == 2 else None
                if dim is not None and p.shape[dim] % ranks == 0:
                    placements[name] = ", ".join(f"d{i}/{axis}" if i == dim else f"d{i}" for i in range(p.ndim))
    return placements
