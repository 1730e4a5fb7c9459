"""Random numbers: the generators that give the same bits everywhere, and `rng`, which draws from torch's.

`rng_bit_generator` maps a state to a new state and bits. ThreeFry and Philox are counters that go through a few
rounds of arithmetic on words of 32 bits; words are held by int64.
"""

from __future__ import annotations

import math

import torch

from tessera.frontends.stablehlo.registry import Site, meaning
from tessera.frontends.stablehlo.values import Value, integers, tensor_of

_MASK = 0xFFFFFFFF


def _rotated(x: torch.Tensor, count: int) -> torch.Tensor:
    return ((x << count) | (x >> (32 - count))) & _MASK


def three_fry(
    key: tuple[torch.Tensor, torch.Tensor], counter: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twenty rounds of Threefry-2x32."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + keys[0]) & _MASK, (counter[1] + keys[1]) & _MASK
    turns = ((13, 15, 26, 6), (17, 29, 16, 24))
    for group in range(5):
        for count in turns[group % 2]:
            x = (x + y) & _MASK
            y = _rotated(y, count) ^ x
        x = (x + keys[(group + 1) % 3]) & _MASK
        y = (y + keys[(group + 2) % 3] + group + 1) & _MASK
    return x, y


def _product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of a product of words, without the 64th bit that int64 has as its sign."""
    low_part, high_part = (x & 0xFFFF) * factor, (x >> 16) * factor
    middle = high_part + (low_part >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low_part & 0xFFFF)


def philox(key: tuple[torch.Tensor, torch.Tensor], counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Ten rounds of Philox-4x32."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        high, low = _product(a, 0xD2511F53)
        high2, low2 = _product(c, 0xCD9E8D57)
        a, b, c, d = high2 ^ b ^ k, low2, high ^ d ^ m, low
        k, m = (k + 0x9E3779B9) & _MASK, (m + 0xBB67AE85) & _MASK
    return a, b, c, d


def _words(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x & _MASK, (x >> 32) & _MASK


@meaning("rng_bit_generator")
def rng_bit_generator(site: Site, state: torch.Tensor) -> list[torch.Tensor]:
    """State first, then bits. The state is a key and a counter, in words of 64 bits or, as JAX has it, of 32."""
    type_ = site.result_at(1)
    count = math.prod(type_.shape)  # type: ignore[arg-type]
    site.machine.check(type_.shape, type_.element)  # type: ignore[arg-type]
    wide = state
    if site.operand(0).element.bits == 32:
        wide = state[0::2] | (state[1::2] << 32)
    if site["rng_algorithm"] != "THREE_FRY":  # the default is Philox, as on XLA's CPU
        new, bits = _philox_bits(wide, count, type_.element.bits)
    else:
        new, bits = _three_fry_bits(wide, count, type_.element.bits, type_.shape)  # type: ignore[arg-type]
    if site.operand(0).element.bits == 32:
        new = torch.stack(_words(new), -1).reshape(-1)
    shaped = bits.reshape(type_.shape)  # type: ignore[arg-type]
    return [new, type_.element.wrap(shaped).to(type_.element.held)]


def _three_fry_bits(
    state: torch.Tensor, count: int, bits: int, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    key, counter = _words(state[0]), state[1]
    if bits == 64:
        low, high = three_fry(key, _words(counter + torch.arange(count, device=state.device)))
        return torch.stack([state[0], counter + count]), low | (high << 32)
    shape = shape or (1,)
    dim = _split(shape)
    half = list(shape)
    half[dim] = -(-half[dim] // 2)
    blocks = math.prod(half)
    words = three_fry(key, _words(counter + torch.arange(blocks, device=state.device)))
    pairs = torch.stack([w.reshape(half) for w in words], dim + 1).flatten(dim, dim + 1)
    return torch.stack([state[0], counter + blocks]), pairs.narrow(dim, 0, shape[dim])


def _split(shape: tuple[int, ...]) -> int:
    """The dimension along which the two words of a counter stand side by side: the first even one, else the largest."""
    return next((d for d, n in enumerate(shape) if n % 2 == 0), max(range(len(shape)), key=lambda d: shape[d]))


def _philox_bits(state: torch.Tensor, count: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    key = _words(state[0])
    low, high = state[1], state[2] if state.shape[0] > 2 else state[0]  # two words of state: the key counts, too
    per = 2 if bits == 64 else 4
    blocks = -(-count // per)
    place = torch.arange(blocks, device=state.device)
    at = low + place
    carried = high + ((at ^ _LOWEST) < (low ^ _LOWEST)).to(torch.int64)
    words = philox(key, (*_words(at), *_words(carried)))
    if bits == 64:
        numbers = torch.stack([words[0] | (words[1] << 32), words[2] | (words[3] << 32)], -1)
    else:
        numbers = torch.stack(words, -1)
    end = low + blocks
    over = ((end ^ _LOWEST) < (low ^ _LOWEST)).to(torch.int64)
    new = [state[0], end] if state.shape[0] == 2 else [state[0], end, high + over]
    return torch.stack(new), numbers.reshape(-1)[:count]


_LOWEST = -(1 << 63)


@meaning("rng", raw=True, folds=False)
def rng(site: Site, a: Value, b: Value, shape: Value) -> torch.Tensor:
    """Between a and b, or normal with mean a and deviation b, from torch's own generator."""
    sizes = integers(shape, "the shape of random numbers")
    low, high = tensor_of(a, site.device), tensor_of(b, site.device)
    held = site.element.held
    site.machine.check(sizes, site.element)
    if site["rng_distribution"] == "NORMAL":
        return low + high * torch.randn(sizes, dtype=held, device=site.device)
    if site.element.floating:
        return low + (high - low) * torch.rand(sizes, dtype=held, device=site.device)
    drawn = torch.rand(sizes, dtype=torch.float64, device=site.device)
    return (low + torch.floor(drawn * (high - low).double())).to(held)
