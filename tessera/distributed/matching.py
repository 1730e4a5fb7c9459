"""What of a checkpoint belongs to which weight of a model, whatever the one who wrote it called things.

In: a `Saved`, a model, an optimizer. Out: a `Found`: tensors by the model's own names and by those of the optimizer's
state. A state dict of the model may stand anywhere in the checkpoint; the one that has most of its names is taken. A
weight that two modules share goes by either name. What is missing, too much, or of another size is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tessera.distributed.optimizer_slots import PREFIX
from tessera.distributed.saved import Kept, Saved
from tessera.util.errors import InputError

SLOT = re.compile(r"(?:^|\.)state\.(?P<owner>.+)\.(?P<slot>[^.]+)$")
OPTION = re.compile(r"(?:^|\.)param_groups\.(?P<owner>.+)\.(?P<option>[^.]+)$")
TOLD = 5  # names in a message


@dataclass(frozen=True)
class Found:
    weights: dict[str, Kept]
    slots: dict[str, Kept]  # by names as `slots_of` gives them
    groups: list  # as `groups_of` gives them


def find(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Found:
    names = names_of(model)
    head = _head(saved, names)
    held = {_plain(path[-1]): kept for path, kept in saved.tensors.items() if path[:-1] == head}
    if saved.groups is not None:  # our own: the optimizer's tensors stand beside the model's
        slots = {name: kept for name, kept in held.items() if name.startswith(PREFIX)}
        held = {name: kept for name, kept in held.items() if name not in slots}
        return Found(_weights(saved, names, held, model), slots, saved.groups)
    slots, options = ({}, {}) if optimizer is None else _optimizer(saved, head, names, model, optimizer)
    flat = {path[-1] for path in saved.tensors if path[:-1] == head and SLOT.search(str(path[-1]))}
    held = {name: kept for name, kept in held.items() if name not in flat or name in _known(names)}
    weights = _weights(saved, names, held, model)
    return Found(weights, slots, [] if optimizer is None else _groups(saved, model, optimizer, options))


def names_of(model: nn.Module) -> dict[str, list[str]]:
    """What is kept of a model: by the name of each weight and buffer, all the names that it goes by."""
    kept = set(model.state_dict())
    names: dict[int, list[str]] = {}
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, x in every:
        if name in kept:
            names.setdefault(id(x), []).append(name)
    return {others[0]: others for others in names.values()}


def _known(names: Mapping[str, list[str]]) -> set[str]:
    return {other for others in names.values() for other in others}


def _plain(name: str) -> str:
    """Without what wrappers put before a model's own names."""
    return str(name).replace("_orig_mod.", "").removeprefix("module.")


def _head(saved: Saved, names: Mapping[str, list[str]]) -> tuple:
    """Where the model's state dict stands: the path under which most of its names are."""
    known, hits = _known(names), dict[tuple, int]()
    for path in saved.tensors:
        hits[path[:-1]] = hits.get(path[:-1], 0) + (_plain(path[-1]) in known)
    return max(hits, key=lambda head: (hits[head], -len(head)), default=())


def _weights(saved: Saved, names: Mapping[str, list[str]], held: dict[str, Kept], model: nn.Module) -> dict[str, Kept]:
    """The model's own, each under its first name; raises where it is not this model's."""
    weights = {name: held[other] for name, others in names.items() for other in others if other in held}
    missing = [name for name in names if name not in weights]
    extra = sorted(held.keys() - _known(names))
    if missing:
        near = ", ".join(difflib.get_close_matches(missing[0], sorted(held), 3, 0.3)) or "none"
        more = f"; it has {_listed(extra)}, which the model has not" if extra else ""
        raise InputError(
            f"load_state: {saved.where} has no {_listed(missing)}, which the model has; near are {near}{more}"
        )
    if extra:
        raise InputError(
            f"load_state: {saved.where} has {_listed(extra)}, which the model has not; is it of another model?"
        )
    tensors = dict[str, Tensor]((*model.named_parameters(), *model.named_buffers()))
    for name, kept in weights.items():
        if kept.shape != tuple(tensors[name].shape):
            raise InputError(
                f"load_state: {saved.where}: {name}: expected {list(tensors[name].shape)}, got {list(kept.shape)}"
            )
    return weights


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
    return ", ".join(names[:TOLD]) + rest


# --- optimizers that others wrote -----------------------------------------------------------------


def _optimizer(
    saved: Saved, head: tuple, names: Mapping[str, list[str]], model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Kept], dict[str, dict[str, Any]]]:
    """Tensors of the state, and options by parameter. Who wrote them may have called parameters by name or number."""
    own = {p: name for name, p in model.named_parameters()}
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    owners = {other: name for name, others in names.items() for other in others}
    owners |= {str(i): own[p] for i, p in enumerate(ordered) if p in own}
    known = _known(names)
    slots, options, groups = dict[str, Kept](), dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    values = {path: (lambda kept=kept, path=path: kept.whole(str(path)).item()) for path, kept in saved.tensors.items()}
    for path, read in {**values, **saved.objects}.items():
        if path[:-1] == head and _plain(path[-1]) in known:
            continue
        text = _plain(".".join(map(str, path)))
        if (match := SLOT.search(text)) and (owner := owners.get(match["owner"])) and path in saved.tensors:
            slots[f"{PREFIX}{owner}.{match['slot']}"] = saved.tensors[path]
        elif match := OPTION.search(text):
            if match["owner"] in owners and not match["owner"].isdigit():
                options.setdefault(owners[match["owner"]], {})[match["option"]] = read()
            else:
                groups.setdefault(match["owner"], {})[match["option"]] = read()
    for group in groups.values():
        for owner in map(str, group.pop("params", ())):
            if _plain(owner) in owners:
                options[owners[_plain(owner)]] = group
    return slots, options


def _groups(
    saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer, options: Mapping[str, dict[str, Any]]
) -> list:
    """The options of each of the optimizer's own groups."""
    own, groups = {p: name for name, p in model.named_parameters()}, []
    for group in optimizer.param_groups:
        params = [own[p] for p in group["params"] if p in own]
        for name in params:
            if name not in options:
                raise InputError(f"load_state: {saved.where} has no optimizer's options for {name}")
            if options[name] != options[params[0]]:
                raise InputError(
                    f"load_state: expected groups as they were saved; {params[0]} and {name} had other options there"
                )
        groups.append({"params": params, "options": options[params[0]] if params else {}})
    return groups
