"""Attention on a mesh whose ranks have parts of the sequence, in one process, beside the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.distributed import in_step
from tessera.frontends.functional.trace import trace_function
from tessera.ir.interp import run
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Mark, Placement
from tessera.ir.verify import verify
from tessera.transforms.shard.partition import Sharded, shard
from tessera.transforms.vjp import vjp


@dataclass(frozen=True)
class Case:
    ranks: int
    ring: bool
    causal: bool = True
    zigzag: bool = False
    heads: int = 4
    pairs: int = 4  # heads of keys and values
    length: int = 8
    mask: str = ""
    backward: bool = True

    def tensors(self) -> list[Tensor]:
        draw = torch.Generator().manual_seed(0)
        sizes = [(2, heads, self.length, 4) for heads in (self.heads, self.pairs, self.pairs, self.heads)]
        return [torch.randn(size, dtype=torch.float64, generator=draw) for size in sizes]

    def masks(self) -> list[Tensor]:
        if not self.mask:
            return []
        draw, size = torch.Generator().manual_seed(1), (2, 1, self.length, self.length)
        numbers = torch.randn(size, dtype=torch.float64, generator=draw)
        places = torch.arange(self.length)
        match self.mask:
            case "numbers":  # some keys are hidden, and of one query all
                hidden = (numbers > 1.0) | (places == 1)[:, None]
                return [numbers.masked_fill(hidden, float("-inf"))]
            case "truths":
                return [numbers > -1]
            case "lower":  # what a causal mask is
                return [places <= places[:, None]]
            case "padding":  # one sequence ends early, the other begins late
                return [torch.stack([places < 3, places >= 2])[:, None, None]]
        raise AssertionError(self.mask)


def check(case: Case) -> Sharded:
    """Results and gradients are those of whole tensors."""
    *args, ct = case.tensors()
    args += case.masks()

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, case.causal, enable_gqa=case.heads != case.pairs)

    trace = trace_function(attend, tuple(args)).trace
    if case.backward:
        trace, args = vjp(trace, list(trace.inputs[:3])).trace, [*args, ct]
    mesh = Mesh.of(cp=case.ranks)
    whole = [Placement.whole(mesh, x.shape) for x in args]
    pairs = zip(trace.inputs, whole, strict=True)
    homes = {v: p.with_axis(2, "cp", Mark(zigzag=case.zigzag)) for v, p in pairs if v.shape[-1] == 4}
    sharded = shard(trace, mesh, {}, homes=homes, ways={"cp": "ring"} if case.ring else {})
    verify(sharded.trace)
    parts = in_step.run(sharded.trace, [in_step.cut(x, p) for x, p in zip(args, whole, strict=True)])
    for part, v, want in zip(parts, sharded.trace.outputs, run(trace, *args), strict=True):
        place = v.type.placement
        assert place.dim_of("cp") == 2
        got = in_step.join(part, place)
        assert (got - want).norm() <= 1e-12 * want.norm()
    return sharded
