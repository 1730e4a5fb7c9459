"""Blocks are shared, copied, given back and evicted as they should be, and the check notices when they are not."""

from __future__ import annotations

import pytest

from tessera.serve.blocks import NULL, BlockPool
from tessera.serve.cache import Cache, Copy, Table


def filled(cache: Cache, tokens: list[int], salt: bytes = b"") -> tuple[Table, int]:
    """A sequence that has computed all of its tokens, and how many of them it found."""
    table, computed = cache.open(tokens, salt)
    cache.grow(table, computed, len(tokens))
    cache.commit(table, tokens, len(tokens))
    return table, computed


def test_a_prefix_is_found_by_tokens_and_salt() -> None:
    cache = Cache(4, [0], [16])
    tokens = list(range(10))
    first, computed = filled(cache, tokens)
    assert computed == 0
    second, computed = filled(cache, [*tokens[:8], 99, 98])
    assert computed == 8 and second.blocks[0][:2] == first.blocks[0][:2] and second.blocks[0][2] != first.blocks[0][2]
    _, other_salt = cache.open(tokens, b"another key")
    _, other_start = cache.open([5, *tokens[1:]])
    assert other_salt == other_start == 0
    cache.check([first, second])


def test_the_last_token_is_always_computed() -> None:
    cache = Cache(4, [0], [16])
    filled(cache, list(range(8)))
    assert cache.open(list(range(8)))[1] == 4


def test_without_reuse_nothing_is_found() -> None:
    cache = Cache(4, [0], [16], reuse=False)
    filled(cache, list(range(9)))
    assert cache.open(list(range(9)))[1] == 0


def test_least_recently_used_blocks_give_way_first() -> None:
    cache = Cache(2, [0], [4])
    old, _ = filled(cache, [1, 2, 3, 4])
    new, _ = filled(cache, [5, 6, 7, 8])
    cache.close(old)
    cache.close(new)
    assert cache.pools[0].cached == 4 and cache.pools[0].available == 4
    filled(cache, [9, 9])
    assert cache.open([1, 2, 3, 4, 0])[1] == 2  # its end went first, its beginning stays
    assert cache.open([5, 6, 7, 8, 0])[1] == 4


def test_a_fork_copies_before_it_writes() -> None:
    cache = Cache(4, [0], [8])
    parent, _ = filled(cache, list(range(6)))
    child = cache.fork(parent, 5)
    assert child is not None and child.blocks == parent.blocks
    cache.grow(child, 5, 6)
    (copy,) = cache.take_copies()
    assert copy == Copy(0, parent.blocks[0][1], child.blocks[0][1]) and copy.source != copy.target
    assert child.blocks[0][0] == parent.blocks[0][0]
    cache.check([parent, child])


def test_windows_give_blocks_back() -> None:
    cache = Cache(4, [0, 6], [16, 16])
    tokens = list(range(20))
    table, _ = filled(cache, tokens)
    assert NULL not in table.blocks[0]
    assert [block == NULL for block in table.blocks[1]] == [True, True, True, False, False]  # the next sees 15 … 19
    cache.check([table])
    later, computed = cache.open([*tokens, 1])
    assert computed == 20 and later.blocks[1][:3] == [NULL] * 3 and later.blocks[1][3:] == table.blocks[1][3:]
    assert cache.fork(table, 8) is None


def test_a_window_bounds_what_a_sequence_needs() -> None:
    assert Cache(4, [8], [4]).capacity() > 1_000_000
    assert Cache(4, [8], [3]).capacity() == 12
    assert Cache(4, [0, 8], [10, 4]).capacity() == 40


def test_the_check_notices() -> None:
    pool = BlockPool(3)
    block = pool.take()
    with pytest.raises(AssertionError, match="counts"):
        pool.check({})
    pool.check({block: 1})
    with pytest.raises(AssertionError, match="counts"):
        pool.check({block: 2})
    pool._free.append(block)
    with pytest.raises(AssertionError, match="two states"):
        pool.check({block: 1})
