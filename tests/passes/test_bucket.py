"""Small exchanges become one: the same values and bytes, fewer exchanges, before overlap and with it."""

from __future__ import annotations

import pytest
import torch

from tessera.distributed import in_step
from tessera.inspection.timeline import timeline
from tessera.ir.builder import Builder
from tessera.ir.dist import EXCHANGES, bytes_sent, exchange_of, is_collective, on
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, contiguous_strides
from tessera.ir.verify import verify
from tessera.machines import machine
from tessera.passes.memory.bucket import bucket
from tessera.passes.memory.overlap import overlap

MESH = Mesh.of(dp=2, tp=2)
CALLS = [  # exchange, its arguments, the size of its operand on a rank
    ("all_gather", (0, "dp"), (3, 2)),
    ("all_gather", (1, "dp"), (2, 3, 2)),
    ("all_gather", (0, "dp", 5), (3,)),
    ("all_gather", (1, "dp", 3), (2, 2)),
    ("all_gather", (0, "tp"), (3, 2)),
    ("reduce_scatter", (0, "dp"), (4, 2)),
    ("reduce_scatter", (1, "dp"), (3, 4, 2)),
    ("reduce_scatter", (0, "dp"), (5,)),
    ("all_reduce", ("dp",), (3, 2)),
    ("all_reduce", ("dp",), (4,)),
    ("all_reduce", ("dp", "max"), (4,)),
    ("all_reduce", ("dp", "max"), ()),
]


def program(read: bool = True) -> tuple[Trace, list]:
    """Every call on an input, its result read by one more equation or given as it is."""
    builder, parts, outs = Builder("exchanges"), [], []
    draw = torch.Generator().manual_seed(0)
    for i, (name, args, shape) in enumerate(CALLS):
        placement = Placement.whole(MESH, shape)
        type_ = TensorType(torch.float64, shape, contiguous_strides(shape), torch.device("cpu"), placement=placement)
        x = builder.input(f"x{i}", type_)
        parts.append([torch.randn(shape, dtype=torch.float64, generator=draw) for _ in range(MESH.ranks)])
        outs.append(builder.emit(getattr(on(MESH), name), builder.call("sin", x), *args))
    return builder.finish([builder.call("cos", y) if read else y for y in outs]), parts


def exchanges(trace: Trace) -> list[str]:
    return [exchange_of(e)[0] for e in trace.equations if exchange_of(e) is not None]


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("then", [lambda trace: trace, overlap])
def test_values_and_bytes_are_the_same(read: bool, then) -> None:
    trace, parts = program(read)
    joined = verify(then(bucket(trace)))
    # along dp: four gathers, two scattered sums that need no padding, two sums, two maxima; the others stay alone
    names = exchanges(joined)
    assert sorted(names) == ["all_gather"] * 2 + ["all_reduce"] * 2 + ["reduce_scatter"] * 2
    assert sum(map(bytes_sent, joined.equations)) == sum(map(bytes_sent, trace.equations)) > 0
    for a, b in zip(in_step.run(joined, parts), in_step.run(trace, parts), strict=True):
        assert all(map(torch.equal, a, b)) and all(x.is_contiguous() for x in a)


def test_what_the_caller_gets_holds_no_bucket() -> None:
    trace, parts = program(False)
    for out in in_step.run(bucket(trace), parts):
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in out)


def chain(count: int) -> Trace:
    """Each sum is read by the equation that makes the next operand."""
    builder = Builder("chain")
    type_ = TensorType(torch.float64, (4,), (1,), torch.device("cpu"), placement=Placement.whole(MESH, (4,)))
    x = builder.input("x", type_)
    for _ in range(count):
        x = builder.call("sin", builder.emit(on(MESH).all_reduce, x, "dp"))
    return builder.finish([x])


def test_what_waits_for_another_stays_alone() -> None:
    trace = chain(3)
    assert bucket(trace) is trace


def test_buckets_that_read_each_other() -> None:
    """Sums along one axis, scattered along the other, several at once."""
    builder, parts, outs = Builder("twice"), [], []
    for i in range(3):
        type_ = TensorType(torch.float64, (4,), (1,), torch.device("cpu"), placement=Placement.whole(MESH, (4,)))
        x = builder.input(f"x{i}", type_)
        y = builder.emit(on(MESH).all_reduce, builder.emit(on(MESH).reduce_scatter, x, 0, "dp"), "tp")
        outs.append(builder.call("sin", y))
        parts.append([torch.arange(4.0, dtype=torch.float64) + rank + i for rank in range(MESH.ranks)])
    trace = builder.finish(outs)
    joined = verify(bucket(trace))
    assert len(exchanges(joined)) < len(exchanges(trace))
    for a, b in zip(in_step.run(joined, parts), in_step.run(trace, parts), strict=True):
        assert all(map(torch.equal, a, b))


def test_sizes() -> None:
    trace, _ = program()
    assert bucket(trace, small=8) is trace
    gathers = [e for e in bucket(trace, room=200).equations if is_collective(e, "all_gather")]
    assert len(gathers) == 4  # 96 and 192 bytes do not fit together, 96 alone, 40 and 48 do


def test_less_is_exposed() -> None:
    """Latency is paid once a bucket."""
    trace, _ = program()
    before, after = (timeline(overlap(t, 10**9), machine("h100")) for t in (trace, bucket(trace)))
    assert after.exchanging < before.exchanging and after.waiting < before.waiting
    assert not any(is_collective(e, *EXCHANGES) for e in overlap(bucket(trace)).equations)
