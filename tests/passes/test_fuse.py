"""Which equations become one kernel, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import programs
import pytest
import torch
import torch.nn.functional as F
from programs import random_program, trace_of
from tile_reference import Reference

import tessera
from tessera.executors import tile
from tessera.executors.regions import body_of
from tessera.ir.equation import Equation, Value
from tessera.ir.interp import run
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ir.verify import verify
from tessera.passes.fuse.compiler import turns
from tessera.passes.fuse.graph import Groups
from tessera.passes.memory.depend import dependencies
from tessera.tile.dialect.ops import REDUCE
from tessera.tile.from_trace.region import lower
from tessera.tile.rewrites.split_reduction import ends_all


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "target_for", lambda device, target=Reference(): target)  # noqa: B008


def fused(fn: Callable, *args: torch.Tensor) -> tuple[Trace, list[set[str]]]:
    """The trace, and for every region the names of the operators in it."""
    trace = tile.decompose(trace_of(fn, *args))
    return trace, [{trace.equations[i].op._opname for i in region} for region in tile.regions(trace)]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_chain_is_one_kernel() -> None:
    _, regions = fused(lambda x, y: (x + y).relu() * 2, rand(4, 8), rand(8))
    assert regions == [{"add", "relu", "mul"}]


def test_one_equation_alone_stays_with_aten() -> None:
    trace, regions = fused(lambda x, w: F.linear(F.relu(F.linear(x, w)), w), rand(8, 8), rand(8, 8))
    assert regions == []
    assert tile.reasons(trace)["relu"] == "nothing to fuse it with"
    assert "stay with the library" in tile.reasons(trace)["linear"]


def channels_last(*shape: int) -> torch.Tensor:
    return rand(*shape).contiguous(memory_format=torch.channels_last)


def test_roots_along_rows_are_taken_once_on_a_cpu() -> None:
    def norm(x: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        return (x * (var + 1e-5).rsqrt()[:, None, None]).relu()

    _, regions = fused(norm, channels_last(2, 8, 4, 4), rand(8).abs())
    assert regions == [{"add", "rsqrt"}, {"mul", "relu"}]
    _, regions = fused(norm, rand(2, 8, 4, 4), rand(8).abs())  # row by row a loop outside of the innermost takes it
    assert len(regions) == 1


def test_what_overlapping_windows_read_is_computed_once_on_a_cpu() -> None:
    _, regions = fused(lambda x, y: F.max_pool2d((x + y).tanh(), 3, 1), rand(1, 2, 9, 9), rand(1, 2, 9, 9))
    assert regions == [{"add", "tanh"}, {"max_pool"}]
    _, regions = fused(lambda x, y: F.max_pool2d((x + y).tanh(), 2), rand(1, 2, 8, 8), rand(1, 2, 8, 8))
    assert len(regions) == 1


def test_windows_are_not_read_at_every_point_of_what_they_are_joined_with() -> None:
    def reduced(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.avg_pool2d(x, 3, 2, 1), y * 2 + 1], 1).relu()

    _, regions = fused(reduced, rand(1, 2, 8, 8), rand(1, 6, 4, 4))
    assert regions == [{"avg_pool2d"}, {"mul", "add", "cat", "relu"}]
    _, regions = fused(lambda x: F.pad(F.max_pool2d(x, 3, 1), (1, 1)) + 1, rand(1, 2, 8, 8))
    assert regions == [{"max_pool"}, {"constant_pad_nd", "add"}]


def test_channels_side_by_side_are_joined_by_the_library_on_a_cpu() -> None:
    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.cat([x, y], 1) + 1).relu()

    trace, regions = fused(joined, channels_last(1, 4, 6, 6), channels_last(1, 8, 6, 6))
    assert regions == [{"add", "relu"}] and "library" in tile.reasons(trace)["cat"]
    _, regions = fused(joined, rand(1, 4, 6, 6), rand(1, 8, 6, 6))
    assert len(regions) == 1 and "cat" in regions[0]


def test_activations_and_sums_over_rows_are_kernels_of_their_own_on_a_cpu() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple:
        h = F.linear(x, w)
        return F.linear(F.silu(h), w), h.sum(0), h.sum(1)

    _, regions = fused(f, rand(8, 8), rand(8, 8))
    assert regions == [{"silu"}, {"sum"}]


def test_a_norm_takes_what_is_before_and_after_it() -> None:
    def block(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple:
        s = x + y
        return s, F.gelu(F.layer_norm(s, (16,), w))

    _, regions = fused(block, rand(2, 8, 16), rand(2, 8, 16), rand(16))
    assert len(regions) == 1 and {"var_mean", "gelu", "add"} <= regions[0]


def test_views_inside_a_kernel_and_outside() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.view(4, 2, 8).transpose(0, 1)  # views of an input stay outside
        z = (y * 2).reshape(2, 32) + 1  # this one is inside
        return F.linear(z.t(), w)  # this one is only for the product

    trace, regions = fused(program, rand(4, 16), rand(3, 2))
    assert regions == [{"mul", "reshape", "add"}]
    assert {"view", "transpose", "t"} <= tile.reasons(trace).keys()


def norm_backward(g: torch.Tensor, x: torch.Tensor, m: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple:
    shape = [x.shape[-1]]
    return torch.ops.aten.native_layer_norm_backward(g, x, shape, m, r, w, w, [True, True, True])


def norm_inputs(*rows: int, row: int = 16) -> tuple[torch.Tensor, ...]:
    return rand(*rows, row), rand(*rows, row), rand(*rows, 1), rand(*rows, 1), rand(row)


@pytest.mark.parametrize("rows", [(32,), (4, 8)])
def test_sums_over_the_rows_beside_reductions_along_them(rows: tuple[int, ...]) -> None:
    args = norm_inputs(*rows)
    before = trace_of(norm_backward, *args)
    trace, regions = fused(norm_backward, *args)
    assert len(regions) == 1 and {"mean", "sum"} <= regions[0]
    assert len(trace.equations) == len(tile.apply(tile.DECOMPOSE, before).equations)  # nothing is computed twice


def test_where_a_target_cannot_the_sums_are_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "target_for", lambda device: Reference("its rows are too long"))
    monkeypatch.setattr(tile, "_checked", {})
    trace, regions = fused(norm_backward, *norm_inputs(32))
    assert len(regions) == 2
    sums = [sum(trace.equations[i].op._opname == "sum" for i in region) for region in tile.regions(trace)]
    assert sorted(sums) == [0, 2]  # both gradients of the weights read the same memory once


def test_what_needs_a_sum_over_the_rows_waits_for_it() -> None:
    def program(x: torch.Tensor) -> tuple:
        y = x - x.mean(-1, keepdim=True)
        return y, y * y.sum(0)

    trace, regions = fused(program, rand(32, 16))
    assert all(not ({"mean", "sum", "mul"} <= region) for region in regions)


def test_siblings_that_read_the_same_are_one_kernel() -> None:
    _, regions = fused(lambda x: ((x * 2).sum(0), (x * x).sum(0), x.amax(0)), rand(32, 16))
    assert regions == [{"mul", "sum", "amax"}]


def test_sums_that_read_the_same_come_together_before_what_follows_each() -> None:
    """An optimizer's update reads a dozen small tensors: with it in the kernel of the first sum, no other sum fits."""

    def sums(g: torch.Tensor, x: torch.Tensor, *small: torch.Tensor) -> tuple:
        masked = torch.where(x > 0, g, 0.0)
        return tuple(_updated(y.sum(0), small[k : k + 11]) for k, y in ((0, masked), (11, masked * x)))

    trace, _ = fused(sums, rand(64, 16), rand(64, 16), *(rand(16) for _ in range(22)))
    reducing = [region for region in tile.regions(trace) if any(_is_sum(trace, i) for i in region)]
    assert len(reducing) == 1 and sum(_is_sum(trace, i) for i in reducing[0]) == 2


def test_sums_beside_a_norm_come_together_before_what_follows_each() -> None:
    def norm(g: torch.Tensor, x: torch.Tensor, *small: torch.Tensor) -> tuple:
        dx = g - (g * x).sum(-1, keepdim=True)
        return dx, *(_updated(y.sum(0), small[k : k + 11]) for k, y in ((0, g), (11, g * x)))

    trace, _ = fused(norm, rand(64, 16), rand(64, 16), *(rand(16) for _ in range(22)))
    (region,) = (region for region in tile.regions(trace) if any(_is_sum(trace, i) for i in region))
    assert sum(_is_sum(trace, i) for i in region) == 3


def _updated(total: torch.Tensor, small: tuple[torch.Tensor, ...]) -> torch.Tensor:
    for t in small:
        total = total * t + 1
    return total


def _is_sum(trace: Trace, i: int) -> bool:
    return trace.equations[i].op._opname == "sum"


def test_what_is_needed_outside_does_not_go_into_a_sum_over_columns() -> None:
    trace, regions = fused(lambda x, w: ((y := x.exp() * 2).sum(0), F.linear(y, w)), rand(32, 16), rand(4, 16))
    assert regions == [{"exp", "mul"}, {"sum"}]


def test_where_sums_have_programs_enough_they_write_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "COMPILER", replace(tile.COMPILER, writes=lambda eqn: eqn.op._opname == "sum"))

    def bias(x: torch.Tensor, w: torch.Tensor) -> tuple:
        y = x.exp() * 2
        return y.sum(0), F.linear(y, w)

    trace, regions = fused(bias, rand(32, 16), rand(4, 16))
    assert regions == [{"exp", "mul", "sum"}] and len(trace.equations) == 4
    _, regions = fused(lambda x: ((y := x.exp() * 2).amax(0), y), rand(32, 16))
    assert {"exp", "mul"} in regions  # not into a reduction of another kind


def test_reductions_one_after_another_are_two_kernels() -> None:
    _, regions = fused(lambda x: torch.exp(x - 1).sum(-1).exp().sum(0).log(), rand(32, 16))
    assert len(regions) == 2


def test_random_numbers_are_left_to_pytorch() -> None:
    trace, regions = fused(lambda x: torch.bernoulli(x.sigmoid() * 0.5) * x + 1, rand(4, 4))
    assert regions == [{"sigmoid", "mul"}, {"mul", "add"}]
    assert "no lowering" in tile.reasons(trace)["bernoulli"]


def test_work_between_two_groups_keeps_them_apart() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.exp() + 1
        return y * F.linear(y, w) + 2

    _, regions = fused(program, rand(8, 8), rand(8, 8))
    assert regions == [{"exp", "add"}, {"mul", "add"}]


def test_what_is_expensive_is_not_computed_again() -> None:
    def windows(x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(F.gelu(x.exp().tanh().sin()))
        return y.unfold(0, 4, 1) + torch.cat([y, y, y, y])[:61, None]

    _, regions = fused(windows, rand(64))
    assert regions and all(not ({"gelu", "unfold"} <= region) for region in regions)


def test_large_kernels_are_cut() -> None:
    def many(*xs: torch.Tensor) -> torch.Tensor:
        return sum(x.exp() for x in xs)  # type: ignore[return-value]

    _, regions = fused(many, *(rand(4, 8) for _ in range(40)))
    assert len(regions) >= 2


@pytest.mark.parametrize("seed", range(40))
def test_regions_of_random_programs_are_convex_and_right(seed: int) -> None:
    program, args = random_program(seed)
    trace = tile.decompose(trace_of(program, *args))
    regions = tile.regions(trace)
    groups = Groups(dependencies(trace))
    for region in regions:
        assert groups.convex({groups.of[i] for i in region})
        groups.join({groups.of[i] for i in region})
    seen = [i for region in regions for i in region]
    assert len(seen) == len(set(seen))
    for region in regions:
        verify(body_of(trace, region, "body"))


def test_copies_leave_the_program_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "target_for", lambda device: Reference("its rows are too long"))
    monkeypatch.setattr(tile, "_checked", {})

    def backward(g: torch.Tensor, x: torch.Tensor, r: torch.Tensor) -> tuple:
        unit = x * r
        return (g * unit).mean(-1, keepdim=True) * unit, (g * unit).sum(0)

    args = rand(32, 16), rand(32, 16), rand(32, 1)
    before = trace_of(backward, *args)
    after = verify(tile.decompose(before))
    assert len(after.equations) > len(before.equations)
    for expected, got in zip(run(before, *args), run(after, *args), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_part_of_an_input_is_written_in_place_beside_kernels():
    """A kernel that took the write in would make the whole cache anew and copy it back."""

    def remember(cache, value):
        cache[2] = value * 2 + 1
        return cache.sum()

    fast = tessera.jit(remember, executors=["tile", "sdpa", "aten"], strict=True)
    cache, value = torch.zeros(4, 3), torch.randn(3)
    like = cache.clone()
    torch.testing.assert_close(fast(cache, value), remember(like, value))
    torch.testing.assert_close(cache, like)
    final = [s.trace for s in tessera.stages(fast)][-1]
    written = [eqn.args[0] for eqn in final.equations if str(eqn.op) == "aten.copy_.default"]
    assert [tuple(v.shape) for v in written] == [(3,)]
    assert all(v is t for t, v in final.mutations.items())


def on_cuda(fn: Callable, *shapes: tuple[int, ...], **dtypes: torch.dtype) -> Trace:
    """`fn` on tensors of a GPU that need not be there, ready for regions."""
    return tile.decompose(programs.on_cuda(fn, *shapes, **dtypes))


def wide_between_kernels(trace: Trace) -> list[str]:
    """Large values of four bytes that a region gives."""
    bodies = [body_of(trace, region, "body") for region in tile.regions(trace)]
    return [v.name for body in bodies for v in body.outputs if v.dtype is torch.float32 and v.tensor.numel() > 2**16]  # type: ignore[union-attr]


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.undo()


@pytest.mark.usefixtures("triton_kernels")
def test_casts_go_where_they_are_read() -> None:
    """A sum over the rows writes what it sums, in the type it has; who needs it wider casts it again."""

    def backward(g: torch.Tensor, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple:
        masked = torch.ops.aten.threshold_backward(g + x, y, 0)
        up = masked.float()
        total = up.sum(0)
        return masked @ w, ((up - total) * up).to(x.dtype) @ w

    trace = on_cuda(backward, (65536, 64), (65536, 64), (65536, 64), (64, 64))
    assert not wide_between_kernels(trace)


def test_casts_that_are_read_in_parts_stay() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        first, second = x.sin().double().split(1, 1)[:2]
        return first.exp() * second

    trace, _ = fused(program, torch.randn(4, 3))
    torch.testing.assert_close(run(trace, torch.ones(4, 3))[0], program(torch.ones(4, 3)))


@pytest.mark.usefixtures("triton_kernels")
def test_batch_norm_moves_no_wide_tensors() -> None:
    def backward(g: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *per: torch.Tensor) -> torch.Tensor:
        w, mean, rstd = (p.float() for p in per)
        masked = torch.ops.aten.threshold_backward(g, y, 0)
        back = torch.ops.aten.native_batch_norm_backward
        return back(masked, x, w, None, None, mean, rstd, True, 1e-5, [True, True, True])

    trace = on_cuda(backward, *[(65536, 64)] * 3, *[(64,)] * 3)
    assert not wide_between_kernels(trace) and len(tile.regions(trace)) == 2


@pytest.mark.usefixtures("triton_kernels")
def test_distances_from_a_mean_are_not_written() -> None:
    """The sums of a batch norm's gradient and the kernel after them both want x - mean, which is wider than x."""

    def backward(g: torch.Tensor, x: torch.Tensor, *per: torch.Tensor) -> torch.Tensor:
        w, b, mean, rstd = (p.float() for p in per)
        away = x.float() - mean
        masked = torch.where((away * rstd * w + b) > 0, g, 0.0)
        up = masked.float()
        total, along = up.sum(0), (up * away).sum(0)
        return masked, ((up - total - away * along) * rstd).bfloat16()

    trace = on_cuda(backward, *[(65536, 64)] * 2, *[(64,)] * 4)
    assert not wide_between_kernels(trace) and len(tile.regions(trace)) == 2
    verify(trace)


@pytest.mark.usefixtures("triton_kernels")
def test_batch_norm_is_two_kernels() -> None:
    def forward(x: torch.Tensor, r: torch.Tensor, *per: torch.Tensor) -> torch.Tensor:
        return F.relu(F.batch_norm(x, *(p.float() for p in per), training=True) + r)

    trace = on_cuda(forward, *[(65536, 64)] * 2, *[(64,)] * 4)
    assert not wide_between_kernels(trace) and len(tile.regions(trace)) == 2


@pytest.mark.usefixtures("triton_kernels")
def test_a_number_on_the_device_is_worth_a_kernel() -> None:
    """A gradient times a loss's cotangent: PyTorch's kernel reads the number again for every element."""
    assert len(tile.regions(on_cuda(torch.mul, (1024, 512), ()))) == 1
    assert not tile.regions(on_cuda(torch.mul, (1024, 512), (1024, 512)))
    assert not tile.regions(on_cuda(torch.mul, (16, 512), ()))


@pytest.mark.usefixtures("triton_kernels")
def test_a_mask_of_whole_rows_is_worth_a_kernel() -> None:
    """PyTorch's kernel looks every element's mask up by itself."""

    def masked(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.masked_fill(x, row, 0.0)

    def trace(*mask: int) -> Trace:
        return on_cuda(masked, (1024, 512), mask, x1=torch.bool)

    assert len(tile.regions(trace(1024, 1))) == 1 and not tile.regions(trace(1024, 512))


# --- running sums down columns, and parts of what is larger ---


def test_a_running_sum_down_columns_takes_what_is_around_it() -> None:
    def places(classes: torch.Tensor) -> torch.Tensor:
        chosen = (classes[:, None] == torch.arange(8)).long()
        return ((chosen.cumsum(0) * chosen).sum(-1) - 1) * 2

    trace, regions = fused(places, torch.randint(8, (300,)))
    assert {"eq", "cumsum", "mul"} <= regions[0] and regions[1] == {"sum", "sub", "mul"}
    _, regions = fused(lambda x: x.exp().cumsum(0) * 2 + x, rand(40, 6))
    assert regions == [{"exp", "cumsum", "mul", "add"}]


def test_a_gather_takes_the_joined_rows_it_reads_from() -> None:
    """Of what is joined only the rows that are read are computed; on a CPU PyTorch checks the indices."""

    def part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat((x * 2, y))[1:9].relu()

    _, regions = fused(part, rand(30, 6), rand(3, 6))
    assert regions == [{"mul", "cat", "relu", "slice"}]

    def shared(x: torch.Tensor, y: torch.Tensor) -> tuple:
        both = torch.cat((x * 2, y))
        return both[1:9].relu(), both[9:20].relu()

    _, regions = fused(shared, rand(30, 6), rand(3, 6))
    assert {"mul", "cat"} in regions


@pytest.mark.usefixtures("triton_kernels")
def test_nothing_that_waits_for_a_long_sum_is_stored_beside_it() -> None:
    """The gradient of a batch norm behind a gate: one program would walk down all rows for every column, twice."""

    def backward(g: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, x: torch.Tensor, mean: torch.Tensor) -> tuple:
        masked = torch.ops.aten.threshold_backward(g * gate, y, 0)
        again = torch.ops.aten.threshold_backward(g * gate, y, 0)
        centred = x - mean
        total, along = masked.float().sum(0), (again.float() * centred.float()).sum(0)
        return (again.float() - total / 65536).to(g.dtype), along, total

    trace = on_cuda(backward, *[(65536, 64)] * 4, (64,))
    kernels = [lower(body_of(trace, region, "body")).kernel for region in tile.regions(trace)]
    assert any(kernel.axis_names(REDUCE) for kernel in kernels)
    assert all(ends_all(kernel) for kernel in kernels if kernel.axis_names(REDUCE))


@pytest.mark.usefixtures("triton_kernels")
def test_bytes_are_turned_in_tiles() -> None:
    """A kernel that has a row at a time would write a byte here and a byte there."""

    def rounded(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        top = x.abs().amax(1)
        q = (x.float() * scale).to(torch.float8_e4m3fn)
        return top, q, q.t().clone(memory_format=torch.contiguous_format)

    trace = on_cuda(rounded, (4096, 512), ())
    kernels = [{trace.equations[i].opname for i in region} for region in tile.regions(trace)]
    assert any("clone" in names for names in kernels)
    assert not any({"clone", "amax"} <= names for names in kernels)


def test_what_is_small_and_dear_is_computed_once() -> None:
    """A table of angles beside many heads, that is; beside few points it is not worth a launch."""

    def f(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return x * (angles * 3).cos() + 1

    angles = torch.empty(1, 1024, 64, device="meta")
    _, regions = fused(f, torch.empty(256, 1024, 64, device="meta"), angles)
    assert sorted(map(sorted, regions)) == [["add", "mul"], ["cos", "mul"]]
    _, regions = fused(f, torch.empty(8, 1024, 64, device="meta"), angles)
    assert regions == [{"mul", "cos", "add"}]


@pytest.mark.parametrize(
    ("device", "side", "turned"), [("cuda", 64, True), ("cuda", 8, False), ("cpu", 64, False)], ids=str
)
def test_large_copies_that_turn_rows_are_written_in_tiles(device: str, side: int, turned: bool) -> None:
    """On a GPU; small ones are worth no launch of their own."""
    place = torch.device(device)
    plain = TensorType(torch.bfloat16, (2, 64, side, side), (64 * side**2, side**2, side, 1), place)
    last = replace(plain, stride=(64 * side**2, 1, 64 * side, 64))
    copies = [Equation(torch.ops.aten.clone.default, (Value("x", plain),), {}, (Value("y", t),)) for t in (plain, last)]
    assert [turns(eqn) for eqn in copies] == [False, turned]


def test_small_work_on_parts_of_one_value_is_one_kernel() -> None:
    """Rows that are read one by one: a launch for all takes less time than one for each."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [F.linear(row.exp() * 2, w) for row in x.unbind(0)]

    def kernels(columns: int, rows: int = 4) -> list[int]:
        trace = tile.decompose(trace_of(fn, rand(rows, 2, columns), rand(3, columns)))
        return [sum(trace.equations[i].opname == "exp" for i in region) for region in tile.regions(trace)]

    assert kernels(8) == [4]
    assert kernels(4096) == [1, 1, 1, 1]  # each of these takes as long as a launch
    assert sum(kernels(8, rows=30)) == 30 and len(kernels(8, rows=30)) > 1  # a kernel holds so many buffers
