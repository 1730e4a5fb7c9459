"""The programs of a model: one step over a flat row of tokens, compiled.

In: a model that follows the protocol `Paged`, and pools. Out: two programs that `tessera.jit` compiles with symbolic
sizes: `mixed` takes any mix of prompt chunks and single tokens, `decode` one token a sequence. They write keys and
values into the pools, which are never copied, and give logits of the rows that are asked for.

Sizes 0 and 1 would be programs of their own: so every size is at least 2, and `fill` pads with tokens of nobody, which
write to block 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from tessera.inspection.programs import Stages, stages
from tessera.just_in_time.api import jit
from tessera.serve.operators import WHOLE, paged_attention, paged_write
from tessera.serve.scheduler import Work
from tessera.torch_internals.dynamo import mark_dynamic

LEAST = 2  # of every size
# Sizes of the first call. They all differ, so that none is taken for another one.
TRIED = {"mixed": (11, 3, 5, 7), "decode": (5, 5, 7, 5)}  # tokens, sequences, columns of the tables, rows


@dataclass(frozen=True)
class Layer:
    """What one layer keeps of every token, and how far it looks back (`WHOLE`: to the beginning)."""

    heads: int
    head: int
    value_head: int
    window: int = WHOLE


class Site(nn.Module):
    """The attention of one layer, over its pools. `step` is what `Step` was called with."""

    keys: Tensor
    values: Tensor

    def __init__(self, layer: Layer, group: int, groups: int, blocks: int, size: int, like: Tensor, single: bool):
        super().__init__()
        self.group, self.groups, self.window, self.single = group, groups, layer.window, single
        for name, head in (("keys", layer.head), ("values", layer.value_head)):
            self.register_buffer(name, like.new_zeros(blocks + 1, size, layer.heads, head), persistent=False)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, step: tuple[Tensor, ...], scale: float, softcap: float = 0.0
    ) -> Tensor:
        """Queries, keys and values [tokens, heads, head] in; [tokens, heads, value head] out."""
        starts, positions = step[:2]
        table, slots = step[2 + self.group], step[2 + self.groups + self.group]
        paged_write(self.keys, k, slots)
        paged_write(self.values, v, slots)
        pools = self.keys, self.values
        return paged_attention(q, *pools, table, starts, positions, scale, self.window, softcap, self.single)


class Paged(Protocol):
    """What the engine asks of a model: modules of one's own follow it, `huggingface.py` brings transformers' to it."""

    vocabulary: int
    longest: int | None  # tokens that its positions allow
    stops: tuple[int, ...]  # tokens that end an answer

    def layers(self) -> list[Layer]:
        """Its attention layers, in order."""
        ...

    def take_sites(self, sites: Sequence[Site]) -> None:
        """Keep these: in place of attention, layer i is to call `sites[i](q, k, v, step, scale)`."""
        ...

    def paged_forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, step: tuple[Tensor, ...]) -> Tensor:
        """Logits of some rows of the flat tokens, or of all."""
        ...


class Step(nn.Module):
    """One step as a module. `places` are a table for every group of layers, then the slots for every group."""

    def __init__(self, model: Paged):
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, positions: Tensor, starts: Tensor, rows: Tensor | None, places: tuple[Tensor, ...]
    ) -> Tensor:
        return self.model.paged_forward(tokens, positions, rows, (starts, positions, *places))


@dataclass(frozen=True)
class Inputs:
    """What a step is called with, on the device."""

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    rows: Tensor
    places: tuple[Tensor, ...]


def groups_of(layers: Sequence[Layer]) -> list[int]:
    """The windows of the groups of layers: those that look equally far back share tables."""
    return sorted({layer.window for layer in layers})


class Program:
    """One of the two programs; `stages` are those of `tessera.stages`."""

    def __init__(self, name: str, call: Callable):
        self.name, self.call = name, call

    @property
    def stages(self) -> Stages:
        return stages(self.call)

    def __repr__(self) -> str:
        return f"<Program {self.name}>"


class Programs:
    """A model's two programs and its pools: `sizes[g]` blocks of `block_size` tokens for each group. Without `compiled`
    the model runs as it is. With `fixed`, every step is a mixed one of so many tokens and rows, and every query attends
    by itself: then what is computed of a token depends on its sequence alone, to the bit."""

    def __init__(
        self, model: Paged, block_size: int, sizes: Sequence[int], compiled: bool = True, fixed: int | None = None
    ):
        self.fixed = fixed
        module = cast("nn.Module", model)
        like = next(p for p in module.parameters() if p.is_floating_point()).detach()
        self.device, self.block_size, layers = like.device, block_size, model.layers()
        windows = groups_of(layers)
        group = [windows.index(layer.window) for layer in layers]
        self.groups = len(windows)
        self.sites = [
            Site(layer, g, len(windows), sizes[g], block_size, like, fixed is not None)
            for layer, g in zip(layers, group, strict=True)
        ]
        model.take_sites(self.sites)
        self.compiled = compiled
        self.by_name = {
            name: Program(name, jit(Step(model), fullgraph=True) if compiled else Step(model))
            for name in TRIED
            if fixed is None or name == "mixed"
        }

    def compile(self) -> None:
        """Compile now what would be compiled at the first call, on tokens of nobody."""
        for name in self.by_name:
            tokens, sequences, columns, rows = TRIED[name]
            at = [0] * tokens
            starts = [*range(sequences), tokens] if name == "mixed" else [*range(tokens + 1)]
            tables = [[[0] * columns] * sequences] * self.groups
            given = self._tensors(at, at, starts, [0] * rows, tables, [at] * self.groups)
            for tensor in (given.tokens, given.positions, given.starts, given.rows, *given.places):
                for dim in range(tensor.ndim):
                    mark_dynamic(tensor, dim)
            self.run(name, given)

    @torch.no_grad()
    def run(self, name: str, given: Inputs) -> Tensor:
        """Logits of the asked rows."""
        rows = given.rows if name == "mixed" else None
        return self.by_name[name].call(given.tokens, given.positions, given.starts, rows, given.places)

    @torch.no_grad()
    def copy(self, group: int, source: int, target: int) -> None:
        """Copy one block of a group, in all of its layers."""
        for site in self.sites:
            if site.group == group:
                for pool in (site.keys, site.values):
                    pool[target].copy_(pool[source])

    def fill(self, works: Sequence[Work], rows: Sequence[int]) -> tuple[str, Inputs]:
        """Which program takes these works, and what it is called with."""
        single = all(len(work.tokens) == 1 for work in works) and list(rows) == list(range(len(works)))
        name = "decode" if single and self.fixed is None else "mixed"
        tokens = [token for work in works for token in work.tokens]
        positions = [p for work in works for p in range(work.first, work.end)]
        starts = [0]
        for work in works:
            starts.append(starts[-1] + len(work.tokens))
        columns = max(LEAST, *(len(blocks) for work in works for blocks in work.sequence.table.blocks))  # type: ignore[union-attr]
        tables, slots = [], []
        for g in range(self.groups):
            blocks = [work.sequence.table.blocks[g] for work in works]  # type: ignore[union-attr]
            tables.append([[*row, *[0] * (columns - len(row))] for row in blocks])
            ranges = zip(blocks, (range(work.first, work.end) for work in works), strict=True)
            slots.append([self._slot(row, p) for row, places in ranges for p in places])
        wanted = self.fixed or LEAST
        while len(starts) <= LEAST or len(tokens) < wanted:  # a sequence of nobody, with the tokens that are missing
            more = max(0, wanted - len(tokens))
            starts.append(starts[-1] + more)
            tokens, positions = [*tokens, *[0] * more], [*positions, *[0] * more]
            for g in range(self.groups):
                tables[g].append([0] * columns)
                slots[g] += [0] * more
        rows = [*rows, *[0] * max(0, wanted - len(rows))]
        return name, self._tensors(tokens, positions, starts, rows, tables, slots)

    def _slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _tensors(self, tokens: list, positions: list, starts: list, rows: list, tables: list, slots: list) -> Inputs:
        def on_device(numbers: Sequence) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64).to(self.device, non_blocking=True)

        places = tuple(on_device(numbers) for numbers in (*tables, *slots))
        return Inputs(on_device(tokens), on_device(positions), on_device(starts), on_device(rows), places)
