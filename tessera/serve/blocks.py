"""A pool of blocks, counted: each one is free, owned, or cached until somebody needs its place.

In: requests for blocks, and names for those whose contents others may want. Out: numbers of blocks. A block that nobody
owns any more is free, or cached where it has a name; the one cached longest gives way first. Block 0 is never handed
out: it takes what padding writes, and stands in tables for what a window has left behind.

Invariant (`check`): every block but 0 is in exactly one of the three states, and counts are exact.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping

NULL = 0  # the block that nobody owns


class BlockPool:
    """`size` blocks that can be owned, numbered from 1."""

    def __init__(self, size: int):
        self.size = size
        self._free = deque(range(1, size + 1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # nobody's, least recently used first
        self._owners = [0] * (size + 1)
        self._name: dict[int, bytes] = {}
        self._by_name: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """How many blocks can be taken now."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def take(self) -> int:
        """A block without contents, for one owner."""
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._by_name[self._name.pop(block)]
        self._owners[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner."""
        self._cached.pop(block, None)
        self._owners[block] += 1

    def give_back(self, block: int) -> None:
        """One owner less."""
        assert self._owners[block] > 0, f"block {block} has no owner to lose"
        self._owners[block] -= 1
        if self._owners[block] == 0:
            if block in self._name:
                self._cached[block] = None
            else:
                self._free.append(block)

    def name(self, block: int, key: bytes) -> None:
        """Let others find this block's contents. Of two blocks with equal contents the first keeps the name."""
        if key not in self._by_name and block not in self._name:
            self._name[block], self._by_name[key] = key, block

    def find(self, key: bytes) -> int | None:
        return self._by_name.get(key)

    def forget(self) -> None:
        """No block has a name any more; those that nobody owns are free."""
        self._free.extend(self._cached)
        for names in (self._cached, self._name, self._by_name):
            names.clear()

    def writable(self, block: int) -> bool:
        """Would nobody notice a write? Others own it too, or may find it, where not."""
        return self._owners[block] == 1 and block not in self._name

    def check(self, owned: Mapping[int, int]) -> None:
        """Raise AssertionError unless `owned` (block -> owners) is all that is owned, and nothing was lost."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, count in enumerate(self._owners) if count}
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & held or cached & held), "a block is in two states"
        assert free | cached | held == set(range(1, self.size + 1)), "a block was lost"
        assert {b: n for b, n in enumerate(self._owners) if n} == dict(Counter(owned)), "counts of owners are wrong"
        assert {key: block for block, key in self._name.items()} == self._by_name, "names and blocks disagree"
        assert cached <= self._name.keys() and not free & self._name.keys(), "a free block has a name"
