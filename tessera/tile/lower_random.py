"""The lowering of `tessera::uniform`: an element's place in row-major order is its place in the stream of words."""

from __future__ import annotations

from tessera.ops.uniform import BITS
from tessera.tile.from_trace_emit import T
from tessera.tile.from_trace_index import ZERO, Indices
from tessera.tile.lower import POINTWISE, Call, Reader, Rule, define
from tessera.tile.lower_view import shape_of


def _uniform(reader: Reader, call: Call, at: Indices) -> T:
    seed = reader.read(call.first, (ZERO,) * call.first.ndim)
    place = reader.emit.iota(reader.ranges.flatten(at, shape_of(call.out)))
    bits = BITS[call.out.dtype]
    return reader.emit.random(seed, place).fn("shr", 32 - bits).to(call.out.dtype) * 2.0**-bits


define("tessera.uniform", Rule(POINTWISE, _uniform, expensive=True))
