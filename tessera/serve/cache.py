"""The cache: which blocks hold which tokens of which sequence.

In: tokens, and how many of them have been computed. Out: a `Table` for each sequence, its blocks by their place in it.
Layers that look equally far back form a group with a pool of its own; a group with a window gives blocks back that no
later token sees. Full blocks are named by a SHA-256 chain over all tokens up to their end, which begins with a salt:
who has the same salt and the same tokens shares the block. A block that others own, or may find, is copied before a
write.

Invariant (`check`): the tables of all sequences own exactly the blocks that the pools say are owned.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

from tessera.serve.blocks import NULL, BlockPool


class Copy(NamedTuple):
    """The contents of one block of a group have to go to another one before the next step writes."""

    group: int
    source: int
    target: int


@dataclass
class Table:
    """One sequence's blocks, for every group, and the names of those that are full."""

    blocks: list[list[int]]
    salt: bytes = b""
    names: list[bytes] = field(default_factory=list)
    changes: int = 0  # how often the blocks became others: copies of a table are told by it


class Cache:
    """`sizes[g]` blocks for the group whose layers look `windows[g]` tokens back; 0 is no window."""

    def __init__(self, block_size: int, windows: Sequence[int], sizes: Sequence[int], reuse: bool = True):
        self.block_size = block_size
        self.windows = tuple(windows)
        self.pools = [BlockPool(size) for size in sizes]
        self.reuse, self._windowed = reuse, any(windows)
        self.copies: list[Copy] = []  # for the next step, in this order

    # --- what fits ---

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def needs(self, group: int, tokens: int) -> int:
        """The most blocks that a sequence of so many tokens owns in a group, computed a token at a time."""
        window = self.windows[group]
        return min(self.blocks_for(tokens), self.blocks_for(window) + 2) if window else self.blocks_for(tokens)

    def capacity(self) -> int:
        """The longest sequence that fits when it is alone."""
        whole = [pool.size * self.block_size for g, pool in enumerate(self.pools) if not self._bounded(g)]
        return min(whole, default=2**62)

    def _bounded(self, group: int) -> bool:
        """Does a sequence of any length fit, thanks to the window?"""
        return bool(self.windows[group]) and self.pools[group].size >= self.blocks_for(self.windows[group]) + 2

    def room(self, table: Table, computed: int) -> int:
        """How many tokens more than `computed` a sequence could have now."""
        more = [self._more(group, table, computed) for group in range(len(self.pools))]
        blocks = min(len(owned) + count for owned, count in zip(table.blocks, more, strict=True))
        return blocks * self.block_size - computed if min(more) >= 0 else 0

    def ready(self, table: Table, place: int) -> bool:
        """Can this place be written as things stand? Where not, `room` and `grow` see to it."""
        at = place // self.block_size
        for pool, blocks in zip(self.pools, table.blocks, strict=True):
            if at >= len(blocks) or not pool.writable(blocks[at]):
                return False
        return True

    def fits(self, table: Table, computed: int, length: int) -> bool:
        """Could the sequence grow to this length now, given that windows give blocks back on the way?"""
        for group, blocks in enumerate(table.blocks):
            owned = len(blocks) - blocks.count(NULL)
            if self.needs(group, length) - owned > self._more(group, table, computed):
                return False
        return True

    def _more(self, group: int, table: Table, computed: int) -> int:
        """Blocks that can be taken, less those that a write from `computed` on has to copy first."""
        pool = self.pools[group]
        shared = sum(not pool.writable(block) for block in table.blocks[group][computed // self.block_size :])
        return pool.available - shared

    # --- a sequence's life ---

    def open(self, tokens: Sequence[int], salt: bytes = b"") -> tuple[Table, int]:
        """A table that shares what is cached of these tokens, and how many tokens that is: never the last one, whose
        logits somebody wants."""
        table = Table([[] for _ in self.pools], salt)
        if not self.reuse:
            return table, 0
        names = self._chain(table, tokens, max(0, len(tokens) - 1) // self.block_size)
        count = self._longest(names)
        table.names = names[:count]
        for group, pool in enumerate(self.pools):
            first = self._first_seen(group, count * self.block_size)
            table.blocks[group] = [NULL] * first
            for name in names[first:count]:
                block = pool.find(name)
                assert block is not None
                pool.share(block)
                table.blocks[group].append(block)
        return table, count * self.block_size

    def _longest(self, names: Sequence[bytes]) -> int:
        """How many of these blocks, from the first, are cached as far as anybody would look at them."""
        present = [[pool.find(name) is not None for name in names] for pool in self.pools]
        most = len(names)
        for group, row in enumerate(present):
            if not self.windows[group] and False in row[:most]:
                most = row.index(False)
        for count in range(most, 0, -1):
            firsts = (self._first_seen(group, count * self.block_size) for group in range(len(self.pools)))
            if all(all(row[first:count]) for row, first in zip(present, firsts, strict=True)):
                return count
        return 0

    def _first_seen(self, group: int, position: int) -> int:
        """The first block that the token at `position` or any later one sees."""
        window = self.windows[group]
        return max(0, position - window + 1) // self.block_size if window else 0

    def grow(self, table: Table, computed: int, length: int) -> None:
        """Let the places from `computed` to `length` be written. `room` has said that there are blocks."""
        table.changes += 1
        for group, pool in enumerate(self.pools):
            blocks = table.blocks[group]
            for i in range(computed // self.block_size, len(blocks)):
                if not pool.writable(blocks[i]):
                    fresh = pool.take()
                    self.copies.append(Copy(group, blocks[i], fresh))
                    pool.give_back(blocks[i])
                    blocks[i] = fresh
            while len(blocks) < self.blocks_for(length):
                blocks.append(pool.take())

    def due(self, table: Table, computed: int) -> bool:
        """Could `commit` have anything to do?"""
        return self._windowed or (self.reuse and computed // self.block_size > len(table.names))

    def commit(self, table: Table, tokens: Sequence[int], computed: int) -> None:
        """So many tokens have been computed, or will be before anybody can look: name the blocks that they fill, as far
        as tokens are known, and give back what windows have passed."""
        known, full = len(table.names), min(computed, len(tokens)) // self.block_size
        if self.reuse and full > known:
            table.names = self._chain(table, tokens, full)
        for group, pool in enumerate(self.pools):
            blocks = table.blocks[group]
            for i in range(known, len(table.names)):
                if blocks[i] != NULL:
                    pool.name(blocks[i], table.names[i])
            for i in range(self._first_seen(group, computed) - 1, -1, -1):
                if blocks[i] == NULL:
                    break
                pool.give_back(blocks[i])
                blocks[i] = NULL
                table.changes += 1

    def fork(self, table: Table, computed: int) -> Table | None:
        """A second sequence that shares the first `computed` tokens; None where a window has passed them already."""
        count = self.blocks_for(computed)
        firsts = [self._first_seen(group, computed) for group in range(len(self.pools))]
        if any(NULL in blocks[first:count] for blocks, first in zip(table.blocks, firsts, strict=True)):
            return None
        blocks = [[NULL] * first + b[first:count] for b, first in zip(table.blocks, firsts, strict=True)]
        for pool, shared in zip(self.pools, blocks, strict=True):
            for block in shared:
                if block != NULL:
                    pool.share(block)
        return Table(blocks, table.salt, table.names[: computed // self.block_size])

    def close(self, table: Table) -> None:
        """The sequence needs its blocks no more. Its last ones give way first: fewer sequences begin with them."""
        for pool, blocks in zip(self.pools, table.blocks, strict=True):
            for block in reversed(blocks):
                if block != NULL:
                    pool.give_back(block)
            blocks.clear()
        table.names.clear()

    def forget(self) -> None:
        """What was computed is not to be trusted: no block is found any more."""
        for pool in self.pools:
            pool.forget()

    def take_copies(self) -> list[Copy]:
        copies, self.copies = self.copies, []
        return copies

    # --- names ---

    def _chain(self, table: Table, tokens: Sequence[int], count: int) -> list[bytes]:
        """The names of a sequence's first `count` blocks; those that it has stay."""
        names = list(table.names)
        for i in range(len(names), count):
            before = names[-1] if names else sha256(b"salt" + table.salt).digest()
            part = array("q", tokens[i * self.block_size : (i + 1) * self.block_size])
            names.append(sha256(before + part.tobytes()).digest())
        return names

    def check(self, tables: Iterable[Table]) -> None:
        """Raise AssertionError where these tables are not all that is owned."""
        tables = list(tables)
        for group, pool in enumerate(self.pools):
            pool.check(Counter(block for t in tables for block in t.blocks[group] if block != NULL))
