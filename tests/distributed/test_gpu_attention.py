"""Attention's kernels on GPUs, by their types alone: a rank's program fits together and has these exchanges."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tessera.ir.builder import Builder, emit
from tessera.ir.dist import exchange_of
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Mark, Placement
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, contiguous_strides
from tessera.ir.verify import verify
from tessera.transforms.shard.partition import shard

SHAPE = (2, 4, 64, 64)
MESH = Mesh.of(cp=2)


def attention(kernel: str) -> Trace:
    """Forward and backward; sizes among the kernel's results are numbers to its backward."""
    builder = Builder("attention")
    type_ = TensorType(torch.bfloat16, SHAPE, contiguous_strides(SHAPE), torch.device("cuda:0"))
    q, k, v, ct = (builder.input(name, type_) for name in ("q", "k", "v", "ct"))
    names = [f"_scaled_dot_product_{kernel}_attention{end}" for end in ("", "_backward")]
    ahead, behind = (partial(emit, getattr(torch.ops.aten, name).default) for name in names)
    size = SHAPE[2]
    with builder:
        match kernel:
            case "flash":
                out, lse, *_, seed, offset, _ = ahead(q, k, v, 0.0, True)
                grads = behind(ct, q, k, v, out, lse, None, None, size, size, 0.0, True, seed, offset)
            case "efficient":
                out, lse, seed, offset = ahead(q, k, v, None, True, 0.0, True)
                wanted = [True, True, True, False]
                grads = behind(ct, q, k, v, None, out, lse, seed, offset, 0.0, wanted, True)
            case "cudnn":
                out, lse, *_, seed, offset, _ = ahead(q, k, v, None, True, 0.0, True)
                grads = behind(ct, q, k, v, out, lse, seed, offset, None, None, None, size, size, 0.0, True)
    return builder.finish([out, *grads[:3]])


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("way", ["ring", "ulysses", "heads"])
def test_kernels(kernel: str, way: str) -> None:
    trace = attention(kernel)
    dim = 1 if way == "heads" else 2
    place = Placement.whole(MESH, SHAPE).with_axis(dim, "cp", Mark(zigzag=way == "ring"))
    homes = dict.fromkeys(trace.inputs, place)
    sharded = shard(trace, MESH, {}, homes=homes, ways={"cp": "ring"} if way == "ring" else {})
    verify(sharded.trace)
    assert not sharded.notes
    assert all(v.type.placement == place for v in sharded.trace.outputs)
    names = [eqn.op.name for eqn in sharded.trace.equations if exchange_of(eqn) is not None]
    if way == "ring" and kernel == "flash":
        assert names == ["permute"] * 6  # keys and values, twice, and their gradients
    else:
        assert names == ([] if way == "heads" else ["all_to_all"] * 4)  # operands are cut of whole ones here
