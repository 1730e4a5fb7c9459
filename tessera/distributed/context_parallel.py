"""How a sequence lies on an axis, read off the program.

In: a captured program, the tensors of a batch, an axis and its word. Out: a `Context`. The sequence is the second
dimension of the batch, of its first tensor where that is as long as what attention sees. Every rank is given all of it
and keeps its part; labels, masks and whatever else has that size there are cut alike, and tables of places or turns
where they meet what is cut. A ring is cut in zigzag if some attention is causal, where there is room for two chunks a
rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera.ir.equation import Value
from tessera.ir.mesh import Mesh
from tessera.ir.placement import PLAIN, Mark, Placement
from tessera.ir.trace import Trace
from tessera.ir.types import Size, size_key
from tessera.ops.factors.rule import arguments, tensors
from tessera.util.errors import OptionError


@dataclass(frozen=True)
class Context:
    axis: str
    length: Size
    mark: Mark

    def homes(self, inputs: Mapping[Value, Placement]) -> dict[Value, Placement]:
        """Where inputs lie that have the sequence in their second dimension."""
        return {
            v: place.with_axis(1, self.axis, self.mark)
            for v, place in inputs.items()
            if v.ndim > 1 and size_key(v.shape[1]) == size_key(self.length)
        }


def context_in(trace: Trace, batch: Sequence[Value], mesh: Mesh, axis: str, ring: bool) -> Context:
    several = [v for v in batch if v.ndim > 1]
    if not several:
        raise OptionError(
            f"plan: {axis} splits the sequence, the second dimension of the batch; got no tensor with one"
        )
    attention = [e for e in trace.equations if e.opname == "scaled_dot_product_attention"]
    lengths = {size_key(v.shape[-2]) for e in attention for v in tensors(e)[:2]}
    first = next((v for v in several if size_key(v.shape[1]) in lengths), several[0])
    length, ranks = first.shape[1], mesh.size(axis)
    if not isinstance(length, int) or length % ranks:
        raise OptionError(f"{first.name}: expected a sequence that {axis}={ranks} divides, got {length} places")
    causal = any(arguments(e)["is_causal"] for e in attention)
    return Context(axis, length, Mark(zigzag=True) if ring and causal and length % (2 * ranks) == 0 else PLAIN)
