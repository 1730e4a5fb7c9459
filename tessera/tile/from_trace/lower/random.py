"""The lowering of `tessera::uniform`: an element's place in row-major order is its place in the stream of words."""

from __future__ import annotations

from tessera.ops.uniform import BITS
from tessera.tile.from_trace.index import ZERO, Indices
from tessera.tile.from_trace.lower.rule import POINTWISE, Call, Reader, Rule, define
from tessera.tile.from_trace.lower.view import shape_of
from tessera.tile.from_trace.values import T


def _uniform(reader: Reader, call: Call, at: Indices) -> T:
    seed = reader.read(call.first, (ZERO,) * call.first.ndim)
    place = reader.emit.iota(reader.ranges.flatten(at, shape_of(call.out)))
    bits = BITS[call.out.dtype]
    return reader.emit.random(seed, place).fn("shr", 32 - bits).to(call.out.dtype) * 2.0**-bits


define("tessera.uniform", Rule(POINTWISE, _uniform, expensive=True))
