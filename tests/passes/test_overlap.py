"""Exchanges between ranks as pairs: the same values, begun early, waited for late, within the window."""

from __future__ import annotations

import pytest
import torch

from tessera.distributed import in_step
from tessera.frontends.functional.trace import trace_function
from tessera.inspection.timeline import Clock, Timeline, timeline
from tessera.ir.builder import Builder, emit
from tessera.ir.dist import EXCHANGES, OVER, bytes_copied, bytes_sent, exchange_of, is_collective, on
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ir.verify import verify
from tessera.machines import machine
from tessera.machines.here import with_figures
from tessera.passes.memory.alias import roots
from tessera.passes.memory.overlap import overlap
from tessera.transforms.shard.partition import shard

MESH = Mesh.of(dp=2)


def layers(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for w in weights:
        x = torch.relu(x @ w)
    return x.t() @ x


def local(splits: str = "[8/dp, 8]") -> tuple[Trace, list]:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(8, 8, dtype=torch.float64, generator=draw) for _ in range(5)]
    trace = trace_function(layers, tuple(tensors)).trace
    texts = ["[8/dp, 8]", *[splits] * 4]
    places = {v: Placement.parse(text, MESH) for v, text in zip(trace.inputs, texts, strict=True)}
    stays = {"dp": "activations"}
    program = shard(trace, MESH, places, trace.inputs[1:], stays).trace
    return program, [in_step.cut(x, places[v]) for x, v in zip(tensors, trace.inputs, strict=True)]


def names(trace: Trace) -> list[str]:
    return [e.op.name if is_collective(e) else e.opname for e in trace.equations]


@pytest.mark.parametrize("splits", ["[8/dp, 8]", "[8, 8/dp]"])
@pytest.mark.parametrize("room", [None, 0, 10**9])
def test_values_and_bytes_are_the_same(splits: str, room: int | None) -> None:
    program, parts = local(splits)
    pairs = verify(overlap(program, room))
    assert not any(is_collective(e, *EXCHANGES) for e in pairs.equations)
    assert sum(map(bytes_sent, pairs.equations)) == sum(map(bytes_sent, program.equations)) > 0
    for a, b in zip(in_step.run(pairs, parts), in_step.run(program, parts), strict=True):
        assert all(map(torch.equal, a, b))


def test_a_gather_begins_while_the_layer_before_is_at_work() -> None:
    order = names(overlap(local()[0]))
    first = order.index("matmul")
    assert order[: first + 1].count("begin") == 2 and order[: first + 1].count("wait") == 1


def test_without_room_one_at_a_time_is_on_its_way() -> None:
    moving = 0
    for name in names(overlap(local()[0], 0)):
        moving += (name == "begin") - (name == "wait")
        assert moving <= 1


def test_with_room_for_all_every_gather_begins_at_once() -> None:
    assert names(overlap(local()[0], 10**9))[:4] == ["begin"] * 4


def test_a_program_of_one_rank_stays_as_it_is() -> None:
    trace = trace_function(layers, (torch.randn(4, 4), torch.randn(4, 4))).trace
    assert overlap(trace) is trace


def with_a_millisecond(figure: str) -> tuple[Timeline, Timeline, int, int]:
    """Timelines without and with such a figure, kernels and copies; what is fused does not count it."""
    program, _ = local()
    h100 = machine("h100")
    slow = with_figures(h100, {figure: 1e-3}, "made up")
    assert timeline(program, slow, fused=True) == timeline(program, h100, fused=True)
    kernels = sum(e.opname in ("matmul", "relu") for e in program.equations)
    copies = sum(bytes_copied(e) > 0 for e in program.equations)
    return timeline(program, h100), timeline(program, slow), kernels, copies


def test_small_kernels_wait_for_the_host() -> None:
    """Unless the device has enough to do; views are no kernels, and what is fused launches nothing."""
    before, after, kernels, _ = with_a_millisecond("call")
    assert before.launching == 0 and after.computing == before.computing
    assert after.seconds > 1e-3 * kernels > before.seconds and after.launching > 0.9e-3 * kernels
    assert f"{1e3 * after.launching:.3f} of waiting for the host" in str(after) and "host" not in str(before)


def test_every_kernel_takes_what_one_takes_that_does_nothing() -> None:
    """Views and what is fused do not."""
    before, after, kernels, copies = with_a_millisecond("kernel")
    assert after.computing - before.computing == pytest.approx(1e-3 * (kernels + copies))


def test_a_busy_device_lets_the_host_run_ahead() -> None:
    program, _ = local()
    quick = with_figures(machine("h100"), {"call": 1e-12}, "made up")
    clock = Clock(quick)
    once = clock.run_all(program)
    assert clock.run_all(program) == pytest.approx(2 * once, rel=1e-3) and clock.launching < 1e-9


def test_a_timeline_tells_what_is_hidden() -> None:
    """Whatever stays exposed is less than without pairs; exchanges are the same, and work but for a copy of a sum."""
    program, _ = local()
    h100 = machine("h100")
    before, after = timeline(program, h100), timeline(overlap(program, 10**9), h100)
    assert before.waiting == pytest.approx(before.exchanging) and before.exchanging == pytest.approx(after.exchanging)
    copied = sum(map(bytes_copied, program.equations)) / h100.bandwidth
    assert after.waiting < before.waiting and after.computing == pytest.approx(before.computing - copied)
    assert after.seconds == pytest.approx(after.computing + after.waiting)
    assert "test_overlap.py:" in str(after)


def test_sums_are_written_over_what_nobody_else_sees() -> None:
    builder, ops = Builder("sums"), on(MESH)
    x = builder.input("x", TensorType(torch.float32, (4, 4), (4, 1), torch.device("cpu")))
    with builder:
        own, read, viewed, turned, given = (emit(torch.ops.aten.mul.Tensor, x, x) for _ in range(5))
        operands = (
            own,
            read,
            emit(torch.ops.aten.view.default, viewed, [16]),
            emit(torch.ops.aten.t.default, turned),
            given,
        )
        sums = [emit(ops.all_reduce, v, "dp") for v in (x, *operands)]
        rest = emit(torch.ops.aten.neg.default, read)
    program = overlap(builder.finish([*sums, rest, given]))
    over = {e.args[0] for e in program.equations if is_collective(e, "begin") and OVER in e.args}
    assert over == {own}
    shares = roots(program)
    assert all(shares[v] == {own} for v, x in zip(sums, (x, *operands), strict=True) if x is own)


# --- behind the last product, and beside all products -----------------------------------------------


def step(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple:
    """Three layers, their gradients, and an update of each; the loss is given back."""
    h = x @ a
    i = torch.relu(h) @ b
    y = torch.relu(i) @ c
    loss, gy = y.square().mean().log(), y / y.shape[0]
    gc, gi = torch.relu(i).t() @ gy, (gy @ c.t()) * (i > 0)
    gb, gh = torch.relu(h).t() @ gi, (gi @ b.t()) * (h > 0)
    ga = x.t() @ gh
    return loss, a - 0.1 * ga, b - 0.1 * gb, c - 0.1 * gc


def trained() -> tuple[Trace, list]:
    """Gradients are scattered, weights gathered again."""
    size = 48
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, size, dtype=torch.float64, generator=draw) / 7 for _ in range(4)]
    trace = trace_function(step, tuple(tensors)).trace
    places = {trace.inputs[0]: Placement.parse(f"[{size}/dp, {size}]", MESH)}
    turned = {e.out for e in trace.equations if e.opname == "t"}
    for eqn in trace.equations:
        if eqn.opname == "matmul" and eqn.inputs()[0] in turned:  # the gradient of a weight
            places[eqn.out] = places[trace.inputs[0]]
    places |= {v: Placement.whole(MESH, v.shape) for v in trace.outputs[1:]}  # type: ignore[union-attr]
    program = shard(trace, MESH, places, trace.inputs[1:], {"dp": "activations"}).trace
    return program, [in_step.cut(x, v.type.placement) for x, v in zip(tensors, program.inputs, strict=True)]


@pytest.fixture
def fast_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices hide what large ones do."""
    monkeypatch.setattr("tessera.passes.memory.overlap.FAST", 1)


def test_updates_move_up_and_what_is_given_back_is_computed_at_the_end(fast_links: None) -> None:
    program, parts = trained()
    pairs = verify(overlap(program))
    for a, b in zip(in_step.run(pairs, parts), in_step.run(program, parts), strict=True):
        assert all(map(torch.equal, a, b))
    for order, early in ((program.equations, 0), (pairs.equations, 2)):
        last = max(i for i, e in enumerate(order) if e.opname == "matmul")
        begun = [i for i, e in enumerate(order) if (exchange_of(e) or [""])[0] == "all_gather"]
        assert len(begun) == 3 and sum(i < last for i in begun) == early, names(pairs)
        log = next(i for i, e in enumerate(order) if e.opname == "log")
        assert (log > last) == (early > 0)


def test_what_was_left_for_later_is_there_when_it_is_read(fast_links: None) -> None:
    """Behind the last product somebody reads what led to no product before it."""

    def f(x: torch.Tensor, a: torch.Tensor) -> tuple:
        h = x @ a
        largest = h.amax() * 2
        y = torch.relu(h) @ a
        return y, largest + 1, y + largest

    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(48, 48, dtype=torch.float64, generator=draw) for _ in range(2)]
    trace = trace_function(f, tuple(tensors)).trace
    places = {trace.inputs[0]: Placement.parse("[48/dp, 48]", MESH)}
    program = shard(trace, MESH, places, trace.inputs[1:], {"dp": "activations"}).trace
    pairs = verify(overlap(program))
    assert names(pairs).index("mul") > max(i for i, name in enumerate(names(pairs)) if name == "matmul")
    parts = [in_step.cut(x, v.type.placement) for x, v in zip(tensors, program.inputs, strict=True)]
    for a, b in zip(in_step.run(pairs, parts), in_step.run(program, parts), strict=True):
        assert all(map(torch.equal, a, b))


def test_something_urgent_goes_first(fast_links: None) -> None:
    """A gather that is read much later does not stand in the way of a sum that is read at once."""

    def f(x: torch.Tensor, a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x @ a
        h = h - h.amax()
        for _ in range(40):
            h = torch.relu(h @ a)
        return h @ w

    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(48, 48, dtype=torch.float64, generator=draw) / 7 for _ in range(3)]
    trace = trace_function(f, tuple(tensors)).trace
    texts = "[48/dp, 48]", "[48, 48]", "[48/dp, 48]"
    places = {v: Placement.parse(text, MESH) for v, text in zip(trace.inputs, texts, strict=True)}
    program = shard(trace, MESH, places, trace.inputs[1:], {"dp": "activations"}).trace
    begun = [e.args[1] for e in overlap(program).equations if is_collective(e, "begin")]
    assert begun == ["all_reduce", "all_gather"], begun
