"""The short way of a Triton kernel to the device, with a launcher that only writes down what it is called with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from programs import trace_of

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.record import record
from tessera.ops.op import keep_whole
from tessera.tile.dialect import interp
from tessera.tile.from_trace import launch as from_trace_launch
from tessera.tile.from_trace.region import lower
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets import named

pytest.importorskip("triton")
from tessera.tile.targets.triton import direct  # noqa: E402

STREAM, FUNCTION, METADATA = 11, 22, ("metadata",)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Launches on "device -1", where tensors of the CPU are."""
    import triton

    made: list[tuple] = []
    active = SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(direct, "current_device", lambda: -1)
    monkeypatch.setattr(direct, "empty_cuda", lambda shape, stride, dtype: torch.empty(shape, dtype=dtype))
    return made


def ready(calls: list[tuple], launcher: object, programs: int = 3, aligned: tuple[bool, ...] = ()) -> None:
    compiled = SimpleNamespace(run=lambda *args: calls.append(args), function=FUNCTION, packed_metadata=METADATA)
    launcher._direct[-1, (), aligned] = direct.Direct(compiled, -1, programs, ())  # type: ignore[attr-defined]


def aligned(*shape: int) -> torch.Tensor:
    memory = torch.empty(torch.Size(shape).numel() + 16)
    skip = -memory.data_ptr() % 64 // 4
    return memory[skip : skip + torch.Size(shape).numel()].view(shape)


def test_numbers_go_to_tritons_launcher(calls: list[tuple]) -> None:
    kernel = lower(trace_of(lambda x: (x * 2).exp(), torch.randn(64, 32)), "k").kernel
    launcher = named("triton").compile(kernel, Schedule((("i0", 128),)))  # type: ignore[union-attr]
    ready(calls, launcher)
    x, y = aligned(64, 32), aligned(64, 32)
    launcher([x, y], ())
    assert calls == [(3, 1, 1, STREAM, FUNCTION, METADATA, None, None, None, x.data_ptr(), y.data_ptr())]


def test_addresses_that_are_not_aligned_go_the_ordinary_way(
    calls: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = lower(trace_of(lambda x: (x * 2).exp(), torch.randn(64)), "k").kernel
    launcher = named("triton").compile(kernel, Schedule((("i0", 64),)))  # type: ignore[union-attr]
    ready(calls, launcher)
    others: list[object] = []
    monkeypatch.setattr(type(launcher), "_ordinary", lambda self, tensors, sizes: others.append(tensors))
    launcher([aligned(65)[1:], aligned(64)], ())
    monkeypatch.setattr(direct, "current_device", lambda: 1)  # another device is the current one
    launcher([aligned(64), aligned(64)], ())
    assert not calls and len(others) == 2


def test_addresses_that_are_not_aligned_go_the_short_way_too(calls: list[tuple]) -> None:
    """Once a kernel is known for that choice of them: rows of a tensor may begin anywhere."""
    kernel = lower(trace_of(lambda x: (x * 2).exp(), torch.randn(64)), "k").kernel
    launcher = named("triton").compile(kernel, Schedule((("i0", 64),)))  # type: ignore[union-attr]
    ready(calls, launcher, programs=1)
    ready(calls, launcher, programs=2, aligned=(False, True))
    x, y = aligned(65), aligned(64)
    launcher([x[1:], y], ())
    launcher([x[:64], y], ())
    assert [(call[0], *call[9:]) for call in calls] == [
        (2, x.data_ptr() + 4, y.data_ptr()),
        (1, x.data_ptr(), y.data_ptr()),
    ]


def test_two_halves_share_one_piece_of_scratch_memory(calls: list[tuple]) -> None:
    def moments(x: torch.Tensor) -> tuple:
        variance, mean = torch.var_mean(x, [0], correction=0)
        return mean, variance

    kernel = lower(trace_of(moments, torch.randn(512, 48)), "k").kernel
    both = named("triton").compile(kernel, Schedule((("i0", 16), ("r", 32)), loop=True, split=8))  # type: ignore[union-attr]
    ready(calls, both.first, 5)
    ready(calls, both.second, 2)
    tensors = [aligned(512, 48), aligned(48), aligned(48)]
    both(tensors, ())
    (first, second) = calls
    assert (first[0], second[0]) == (5, 2) and first[9:] == second[9:]
    scratch = first[9 + len(tensors) :]
    assert len(scratch) == len(both.scratch) and all(b - a >= 8 * 48 * 4 for a, b in zip(scratch, scratch[1:]))  # noqa: B905


@pytest.mark.parametrize("over", [{}, {0: 0}], ids=["fresh", "in place"])
def test_the_python_around_a_kernel_on_a_gpu(monkeypatch: pytest.MonkeyPatch, over: dict[int, int]) -> None:
    """Results are allocated on the current device; where that is another one, the launch is made on the right one."""
    where = [0]

    class On:
        def __init__(self, device: int) -> None:
            self.before, self.device = where[0], device

        def __enter__(self) -> None:
            where[0] = self.device

        def __exit__(self, *error: object) -> None:
            where[0] = self.before

    def empty(shape: tuple, stride: tuple, dtype: torch.dtype) -> torch.Tensor:
        assert where[0] == 1
        return torch.empty_strided(shape, stride, dtype=dtype)

    monkeypatch.setattr(from_trace_launch, "current_device", lambda: where[0])
    monkeypatch.setattr(from_trace_launch, "empty_cuda", empty)
    monkeypatch.setattr(torch.cuda, "device", On)
    mode = fake.default_mode()
    with mode:
        given = [torch.empty(4, 6, device="cuda:1"), torch.empty(6, device="cuda:1")]
    trace, _ = record(lambda x, w: x * w + 1, given, ["x", "w"], keep_whole, Builder("program", mode))
    lowered = lower(trace, "k")
    launch = from_trace_launch.launcher(
        trace, lowered, lambda tensors, symbols: interp.run(lowered.kernel, tensors, symbols), over
    )
    for x in (torch.randn(4, 6), torch.randn(6, 4).t()):
        w = torch.randn(12)[::2]
        want = x * w + 1
        made = launch(x, w)
        torch.testing.assert_close(x if over else made[0], want)
        assert where == [0] and len(made) == (0 if over else 1)
