"""`tessera.experts` written out: every choice takes the same time.

In: tokens, which experts each of them chose, and the experts' matrices. Where experts have as many places as there are
tokens, every token goes through all of them, as one product before and one behind. Where they have fewer, each expert
has *slots*: the address of a token's slot is computed, rows go there and come back, and what nobody chose is computed
too and never read.
"""

from __future__ import annotations

import torch

from tessera.ops.experts import ACTIVATIONS
from tessera.spatial.importer.written_out import compared, rows_of, written

Tensor = torch.Tensor


@written("tessera.experts")
def experts(
    tokens: Tensor, choice: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, activation: str,
    most: int,
) -> Tensor:  # fmt: skip
    stacks = up, down, gate, ACTIVATIONS[activation].run
    if 0 < most < tokens.shape[0]:
        return _in_slots(tokens, choice, weights, stacks, most)
    return _all(tokens, choice, weights, stacks)


def _all(tokens: Tensor, choice: Tensor, weights: Tensor, stacks: tuple) -> Tensor:
    """Every token through every expert; one that did not choose it adds nothing, whatever came of it."""
    up, down, gate, activation = stacks
    count, between, wide = up.shape
    none = torch.zeros((), dtype=weights.dtype)
    firsts = [tokens @ stack.reshape(-1, wide).t() for stack in (up, gate) if stack is not None]
    hidden = []
    for expert in range(count):
        chosen = choice == expert
        share = torch.where(chosen, weights, none).sum(1, keepdim=True)
        above, *gated = (first[:, expert * between : (expert + 1) * between] for first in firsts)
        made = activation(gated[0]) * above if gated else activation(above)
        hidden.append(torch.where(chosen.any(1, keepdim=True), made * share, none))
    return torch.cat(hidden, 1) @ down.transpose(1, 2).reshape(count * between, wide)


def _in_slots(tokens: Tensor, choice: Tensor, weights: Tensor, stacks: tuple, slots: int) -> Tensor:
    up, down, gate, activation = stacks
    count, (rows, chosen) = up.shape[0], choice.shape
    flat = choice.reshape(-1)
    place = places(flat)
    there = (flat >= 0) & (flat < count) & (place < slots)
    slot = torch.where(there, flat * slots + place, torch.full((), -1, dtype=flat.dtype))
    compared("slots of experts", count * slots, slot.numel())
    hit = slot == torch.arange(count * slots).unsqueeze(-1)  # [slots, choices]
    token = (torch.arange(rows * chosen) // chosen).expand(hit.shape)
    source = torch.where(hit, token, torch.zeros((), dtype=torch.int64)).sum(-1)
    x = rows_of(tokens, source).reshape(count, slots, -1)
    above = x @ up.transpose(1, 2)
    hidden = activation(above) if gate is None else activation(x @ gate.transpose(1, 2)) * above
    made = (hidden @ down.transpose(1, 2)).reshape(count * slots, -1)
    back = rows_of(made, torch.where(there, slot, torch.zeros((), dtype=slot.dtype)))
    own = torch.where(there.unsqueeze(-1), back * weights.reshape(-1, 1), torch.zeros((), dtype=back.dtype))
    return own.reshape(rows, chosen, -1).sum(1)


def places(flat: Tensor) -> Tensor:
    """How many before a choice are for the same expert."""
    n = flat.shape[0]
    compared("places of choices", n, n)
    before = torch.ones(n, n, dtype=torch.bool).tril(-1)
    return ((flat.unsqueeze(-1) == flat.unsqueeze(-2)) & before).to(torch.int64).sum(-1)
