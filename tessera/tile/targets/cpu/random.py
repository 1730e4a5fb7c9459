"""Philox 4x32: word `offset % 4` of block `offset // 4`, for a 64-bit seed (the key)."""

from __future__ import annotations

from tessera.tile.targets.cpu.code import V
from tessera.tile.targets.cpu.host import HostCode as Code
from tessera.util.philox import KEY_STEPS, ROUND_FACTORS, ROUNDS, WORD


def philox(b: Code, seed: V, offset: V) -> V:
    """32-bit words are held in i64, so that one multiplication gives both halves of a product."""

    def word(x: V) -> V:
        return b.bin("and", x, b.const("i64", WORD))

    def high(x: V) -> V:
        return b.bin("lshr", x, b.const("i64", 32))

    keys = [word(seed), high(seed)]
    counter = b.bin("ashr", offset, b.const("i64", 2))
    c = [word(counter), high(counter), b.const("i64", 0), b.const("i64", 0)]
    for _ in range(ROUNDS):
        first = b.bin("mul", c[0], b.const("i64", ROUND_FACTORS[0]))
        second = b.bin("mul", c[2], b.const("i64", ROUND_FACTORS[1]))
        c = [
            b.bin("xor", b.bin("xor", high(second), c[1]), keys[0]),
            word(second),
            b.bin("xor", b.bin("xor", high(first), c[3]), keys[1]),
            word(first),
        ]
        keys = [word(b.bin("add", k, b.const("i64", s))) for k, s in zip(keys, KEY_STEPS, strict=True)]
    number = b.bin("and", offset, b.const("i64", 3))
    chosen = c[3]
    for k in (2, 1, 0):
        chosen = b.select(b.compare("eq", number, b.const("i64", k)), c[k], chosen)
    return chosen
