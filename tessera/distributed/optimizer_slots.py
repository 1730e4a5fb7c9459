"""An optimizer's state by the names of the parameters it belongs to.

In: a model and its optimizer. Out: tensors called `optimizer.<parameter>.<slot>`, and options of groups as plain data.
An optimizer that has made no step yet has no state; it is made for what is to be loaded, as its parameters lie.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tessera.util.errors import InputError

PREFIX = "optimizer."
Plain = (int, float, bool, str, type(None))


def slots_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, wanted: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, Tensor]:
    """Tensors of the state; those that are `wanted`, with these sizes, and not there are made."""
    params = dict(model.named_parameters())
    for key, shape in (wanted or {}).items():
        name, _, slot = key.removeprefix(PREFIX).rpartition(".")
        if name not in params or not any(p is params[name] for g in optimizer.param_groups for p in g["params"]):
            raise InputError(f"load_state: expected an optimizer that owns {name}, whose {slot} was saved")
        if slot not in optimizer.state[params[name]]:
            optimizer.state[params[name]][slot] = _fresh(optimizer, params[name], slot, shape)
    slots = {}
    for name, p in params.items():
        for slot, x in optimizer.state.get(p, {}).items():
            if isinstance(x, Tensor):
                slots[f"{PREFIX}{name}.{slot}"] = x
    return slots


def _fresh(optimizer: torch.optim.Optimizer, p: nn.Parameter, slot: str, shape: tuple[int, ...]) -> Tensor:
    if slot != "step" and shape == tuple(p.shape):
        return torch.zeros_like(p.detach())
    group = next(g for g in optimizer.param_groups if any(q is p for q in g["params"]))
    counted_there = slot != "step" or group.get("capturable") or group.get("fused")
    return torch.zeros(shape, dtype=torch.float32, device=p.device if counted_there else "cpu")


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict]:
    """Options of each group, and the names of its parameters."""
    names = {p: name for name, p in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        options = {key: _plain(key, value) for key, value in group.items() if key != "params"}
        groups.append({"params": [names[p] for p in group["params"] if p in names], "options": options})
    return groups


def _plain(key: str, value: object) -> object:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)) and all(isinstance(x, Plain) for x in value):
        return list(value)
    if isinstance(value, Plain):
        return value
    raise InputError(f"save_state: expected the optimizer's {key} to be a number or a text, got {type(value).__name__}")


def load_groups(model: nn.Module, optimizer: torch.optim.Optimizer, saved: list[dict]) -> None:
    """Take the options over; groups must hold the same parameters."""
    here = groups_of(model, optimizer)
    if [g["params"] for g in here] != [g["params"] for g in saved]:
        raise InputError(
            f"load_state: expected an optimizer with the groups that were saved ({_told(saved)}), got {_told(here)}"
        )
    for group, known in zip(optimizer.param_groups, saved, strict=True):
        extra = sorted(known["options"].keys() - group.keys() - {"initial_lr"})  # a scheduler's
        missing = sorted(optimizer.defaults.keys() - known["options"].keys())
        if extra and missing:  # versions of PyTorch know more options or fewer, not others
            raise InputError(
                f"load_state: expected the state of {type(optimizer).__name__}, with its {', '.join(missing)}, got "
                f"another optimizer's, with {', '.join(extra)}"
            )
        for key, value in known["options"].items():
            before = group.get(key)
            if isinstance(before, Tensor):
                before.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(before, tuple) else value


def _told(groups: list[dict]) -> str:
    return " and ".join(f"{len(g['params'])} parameters" for g in groups) or "none"
