"""The programs of a model: one step over a flat row of tokens, compiled.

In: a model that follows the protocol `Paged`, and pools. Out: programs that `tessera.jit` compiles with symbolic sizes:
`mixed` takes any mix of prompt chunks and single tokens, `decode` one token a sequence. They write keys and values into
the pools, which are never copied, and give logits of the rows that are asked for. On a GPU `decode` has two programs
more, `few` and `one`, for as many sequences as the kernels over few rows take.

Sizes 0 and 1 would be programs of their own: so every size is at least 2, and `fill` pads with tokens of nobody, which
write to block 0.

The compiler is imported when there is something to compile: an engine from an artifact starts without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tessera.serve.graphs import Graphs
from tessera.serve.inputs import (
    BOUNDS,
    LEAST,
    MOST_REPLAYED,
    SHORT,
    STEADY,
    TRIED,
    Filled,
    Inputs,
    Sizes,
    Tables,
    bucket,
    first_call,
    padded,
    short,
    wide,
)  # fmt: skip
from tessera.serve.invariant import invariant, prepare
from tessera.serve.operators import WHOLE, paged_attention, paged_write
from tessera.serve.scheduler import UNKNOWN, Answer, Work
from tessera.util.phases import phase

if TYPE_CHECKING:
    from tessera.inspection.programs import Stages

KEPT = ("mixed", "decode")  # programs that there are everywhere


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

    def pools(self, step: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, step: tuple[Tensor, ...], scale: float, softcap: float = 0.0
    ) -> Tensor:
        """Queries, keys and values [tokens, heads, head] in; [tokens, heads, value head] out."""
        starts, positions = step[:2]
        table, slots = step[2 + self.group], step[2 + self.groups + self.group]
        keys, values = self.pools(step)
        paged_write(keys, k, slots)
        paged_write(values, v, slots)
        return paged_attention(q, keys, values, table, starts, positions, scale, self.window, softcap, self.single)


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


def kept_as(model: Paged) -> tuple[torch.device, torch.dtype]:
    """Where a model is, and as what its keys and values are kept unless somebody says otherwise."""
    if not isinstance(model, nn.Module):  # an artifact's
        return model.device, model.stored  # type: ignore[attr-defined]
    some = next(p for p in model.parameters() if p.is_floating_point())
    return some.device, some.dtype


class Step(nn.Module):
    """One step as a module. `places` are a table for every group of layers, then the slots for every group."""

    def __init__(self, model: Paged, deterministic: bool = False):
        super().__init__()
        self.model, self.deterministic = model, deterministic

    def forward(
        self, tokens: Tensor, positions: Tensor, starts: Tensor, rows: Tensor | None, places: tuple[Tensor, ...]
    ) -> Tensor:
        with invariant(self.deterministic):
            return self.model.paged_forward(tokens, positions, rows, (starts, positions, *places))


def groups_of(layers: Sequence[Layer]) -> list[int]:
    """The windows of the groups of layers: those that look equally far back share tables."""
    return sorted({layer.window for layer in layers})


class Program:
    """One of the programs; `stages` are those of `tessera.stages`."""

    def __init__(self, name: str, call: Callable):
        self.name, self.call = name, call

    @property
    def stages(self) -> Stages:
        return importlib.import_module("tessera.inspection.programs").stages(self.call)

    def __repr__(self) -> str:
        return f"<Program {self.name}>"


class Programs:
    """A model's programs and its pools: `sizes[g]` blocks of `block_size` tokens for each group. Without `compiled`
    the model runs as it is. With `deterministic`, what is computed of a token depends on its sequence alone, to the
    bit: every step is a mixed one, of products and attention whose sums no other sequence changes. `stored`: the pools'
    type. `sampled` holds the tokens of the latest step, of which there are at most `most`: the next one may read them
    there, before anybody on the host has. `wide`: the model for steps of many rows, if that is another one."""

    def __init__(
        self, model: Paged, block_size: int, sizes: Sequence[int], compiled: bool = True, deterministic: bool = False,
        stored: torch.dtype | None = None, most: int = 2048, wide: Paged | None = None,
    ):  # fmt: skip
        self.model, self.deterministic = model, deterministic
        self._wide = model if wide is None else wide
        if deterministic and isinstance(model, nn.Module):
            prepare()
        self.device, kept = kept_as(model)
        self.block_size, layers = block_size, model.layers()
        empty = torch.empty(0, dtype=stored or kept, device=self.device)  # pools are like it
        windows = groups_of(layers)
        group = [windows.index(layer.window) for layer in layers]
        self.groups = len(windows)
        self.sampled = torch.zeros(most, dtype=torch.int64, device=self.device)
        self._tables = Tables(self.groups)
        with phase("cache"):
            self.sites = [
                Site(layer, g, len(windows), sizes[g], block_size, empty, deterministic)
                for layer, g in zip(layers, group, strict=True)
            ]
        for each in {model, self._wide}:
            each.take_sites(self.sites)
        self.compiled = compiled
        self.by_name = {name: Program(name, self._program(name)) for name in self._names()}
        self.single = "mixed" if deterministic else "decode"  # the program of steps of single tokens
        replays = compiled and self.device.type == "cuda"
        self.graphs = Graphs(self._call, self.groups, self.device) if replays else None

    def _names(self) -> tuple[str, ...]:
        if self.deterministic:
            return ("mixed",)
        few = tuple(getattr(self.model, "few", BOUNDS)) if self.compiled else ()
        if few and importlib.import_module("tessera.ops.rows.limits").runs(self.device):
            return (*KEPT, *few)
        return KEPT

    def _program(self, name: str) -> Callable:
        if (ready := getattr(self.model, "program", None)) is not None:
            return ready(name)
        if not self.compiled:
            return Step(self.model, self.deterministic)
        step = Step(self._wide if name in KEPT else self.model, self.deterministic)
        return importlib.import_module("tessera.just_in_time.api").jit(step, fullgraph=True)

    def explain(self) -> list[str]:
        """What the compiler did with each program; or what a file says that holds them."""
        if (loaded := getattr(self.model, "loaded", None)) is not None:
            return [loaded.explain()]
        explain = importlib.import_module("tessera.inspection.explain").explain
        return [f"\n{name}\n{explain(p.call)}" for name, p in self.by_name.items()] if self.compiled else []

    @phase("compiling")
    def compile(self) -> None:
        """Compile now what would be compiled at the first call, on tokens of nobody."""
        mark_dynamic = importlib.import_module("tessera.torch_internals.dynamo").mark_dynamic
        for name in self.by_name:
            placed, sizes = self._placed(first_call(name, self.groups)), TRIED[name]
            ranges = {sizes.sequences: {"min": LEAST, "max": BOUNDS[name]}} if name in BOUNDS else {}
            for tensor in (*placed[:4], *placed.places):
                for dim, size in enumerate(tensor.shape):
                    if sizes.sequences > 1 or size == sizes.columns:
                        mark_dynamic(tensor, dim, **ranges.get(size, {}))
            self._compute(name, placed)

    @phase("warming")
    def warm(self, running: int) -> None:
        """Get ready now what serving so many sequences needs: the kernels of prompts, which libraries choose by their
        lengths, and the steps that are captured, the largest first. Texts of more than the fewest columns are captured
        as they come, and so are prompts."""
        if self.graphs is None:
            return
        self._warm_prompts(len(self.sampled), running > 1)
        counts = {self._bucket(n) for n in range(self._least, max(running, self._least) + 1)}
        for rows in sorted(counts, reverse=True):
            sizes = self._singles(rows, LEAST)
            flat = torch.zeros(sizes.length(self.groups), dtype=torch.int64)
            Inputs.of(flat, sizes, self.groups).starts[:] = torch.arange(sizes.sequences + 1).clamp(max=rows)
            for _ in range(2):  # the first time gets kernels ready
                self.run(self.single, Filled(sizes, flat, True))

    def _warm_prompts(self, longest: int, every: bool) -> None:
        lengths = {longest >> i for i in range(longest.bit_length())}
        lengths |= set(range(SHORT, min(longest, MOST_REPLAYED) + 1, SHORT)) if every else set()
        steps = {self._prompt(tokens) for tokens in lengths}
        # One more beside a long text, whose attention takes a kernel more.
        steps.add((self._prompt(SHORT)[0]._replace(columns=wide(512)), False))
        for sizes, again in sorted(steps, reverse=True):
            flat = torch.zeros(sizes.length(self.groups), dtype=torch.int64)
            Inputs.of(flat, sizes, self.groups).starts[1:] = sizes.tokens  # one sequence has them all
            self.run("mixed", Filled(sizes, flat, again))

    def _prompt(self, tokens: int) -> tuple[Sizes, bool]:
        """The sizes of a step of one prompt, and whether it is one of those that are replayed."""
        columns = -(-tokens // self.block_size)
        sizes = short(tokens, 1, columns, 1)
        return sizes or Sizes(padded(tokens), STEADY, padded(columns), STEADY), sizes is not None

    @torch.no_grad()
    def run(self, name: str, given: Filled, capture: bool = True) -> Tensor:
        """Logits of the asked rows. What a graph gives is overwritten by the next step. `capture`: there is time for
        it."""
        if given.again and self.graphs is not None:
            return self.graphs(name, given, capture)
        return self._call(name, self._placed(given))

    def _placed(self, given: Filled) -> Inputs:
        return Inputs.of(given.flat.to(self.device, non_blocking=True), given.sizes, self.groups)

    def _call(self, name: str, given: Inputs) -> Tensor:
        """A token below 0 is one that the step before has drawn, -1 in its first row."""
        if name == "decode":
            fits = (small for small, most in BOUNDS.items() if len(given.tokens) <= most and small in self.by_name)
            name = next(fits, name)
        drawn = self.sampled[(-1 - given.tokens).clamp_(min=0)]
        return self._compute(name, given._replace(tokens=torch.where(given.tokens < 0, drawn, given.tokens)))

    @torch.no_grad()
    def _compute(self, name: str, given: Inputs) -> Tensor:
        rows = given.rows if name == "mixed" else None
        return self.by_name[name].call(given.tokens, given.positions, given.starts, rows, given.places)

    @torch.no_grad()
    def copy(self, group: int, source: int, target: int) -> None:
        """Copy one block of a group, in all of its layers."""
        for site in self.sites:
            if site.group == group:
                for pool in (site.keys, site.values):
                    pool[target].copy_(pool[source])

    @property
    def _least(self) -> int:
        """Sequences of a decode step: one by itself has a program of its own, or another one beside it."""
        return 1 if "one" in self.by_name else LEAST

    def fill(
        self, works: Sequence[Work], rows: Sequence[int], coming: Mapping[Answer, int] = MappingProxyType({})
    ) -> tuple[str, Filled]:
        """Which program takes these works, and what it is called with. `coming`: the rows of the step before that give
        tokens which are not known."""
        counts = [len(work.tokens) for work in works]
        single = max(counts) == 1 and list(rows) == list(range(len(works)))
        name = self.single if single else "mixed"
        sizes, again = self._sizes(works, counts, len(rows), single)
        flat = torch.zeros(sizes.length(self.groups), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        given = Inputs.of(flat, sizes, self.groups)
        tokens, positions, starts, asked = (part.numpy() for part in given[:4])
        places = [part.numpy() for part in given.places]
        count = sum(counts)
        sequence = np.repeat(np.arange(len(works)), counts)
        ends = np.cumsum(counts)
        tokens[:count] = [token for work in works for token in work.tokens]
        positions[:count] = np.arange(count) + (np.array([work.end for work in works]) - ends)[sequence]
        starts[1 : len(works) + 1] = ends
        # Tokens that are missing belong to nobody: one sequence has them all, or each has a sequence of its own.
        starts[len(works) + 1 :] = np.arange(count + 1, sizes.tokens + 1) if single else sizes.tokens
        asked[: len(rows)] = rows
        for i in np.flatnonzero(tokens[:count] == UNKNOWN):
            tokens[i] = -1 - coming[works[sequence[i]].sequence]
        at, inside = np.divmod(positions[:count], self.block_size)
        kept = self._tables.of([work.sequence.table for work in works], sizes.columns)  # type: ignore[misc]
        for table, slots, known in zip(places[: self.groups], places[self.groups :], kept, strict=True):
            table[: len(works)] = known
            slots[:count] = known[sequence, at] * self.block_size + inside
        return name, Filled(sizes, flat, again)

    def _sizes(self, works: Sequence[Work], counts: Sequence[int], rows: int, single: bool) -> tuple[Sizes, bool]:
        """How large a step is, and whether it is one of those that are replayed."""
        columns = max(LEAST, *(len(blocks) for work in works for blocks in work.sequence.table.blocks))  # type: ignore[union-attr]
        tokens, sequences = sum(counts), len(works)
        if single:
            return self._singles(tokens, columns), self.graphs is not None
        if self.graphs is not None and (sizes := short(max(tokens, LEAST), sequences, columns, rows)) is not None:
            return sizes, True
        tokens, sequences, columns, rows = (max(size, LEAST) for size in (tokens, sequences, columns, rows))
        least = 1
        if self.graphs is not None:
            tokens, sequences, columns, rows = map(padded, (tokens, sequences, columns, rows))
            least = STEADY
        elif self.deterministic:
            tokens, rows = padded(tokens), padded(rows)
        if tokens > sum(counts) and len(works) == sequences:
            sequences += least
        if tokens == sequences and max(counts) > 1:
            sequences += least  # as many sequences as tokens: kernels take that for one token each
        return Sizes(tokens, sequences, columns, rows), False

    def _singles(self, tokens: int, columns: int) -> Sizes:
        """The sizes of a step of single tokens."""
        tokens = self._bucket(tokens)
        columns = columns if self.graphs is None else wide(columns)
        return Sizes(tokens, tokens, columns, tokens)

    def _bucket(self, tokens: int) -> int:
        tokens = max(tokens, self._least) if self.graphs is None else bucket(max(tokens, self._least))
        return padded(tokens) if self.deterministic else tokens
