"""Choosing schedules: the same without measuring, the fastest with it, and remembered on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import kernels
import pytest
import torch

from tessera.machines import machine
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.schedules.cost import Cost, cost, roofline
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets import autotune
from tessera.tile.targets.base import Target
from tessera.util import disk as cache
from tessera.util.config import override

SCHEDULES = [Schedule((("i", n),), warps=n, extra=(("switch", True),)) for n in (1, 2, 4)]


class FakeKernel:
    source = "fake"

    def __init__(self, log: list[int], schedule: Schedule) -> None:
        self.log, self.schedule = log, schedule

    def __call__(self, tensors: Sequence[torch.Tensor], symbols: Sequence[int]) -> None:
        self.log.append(self.schedule.warps)
        for t in tensors:
            t.zero_()


class FakeTarget:
    """Proposes three schedules, of which the first does not compile."""

    name = "fake"
    machine = machine("h200")

    def __init__(self) -> None:
        self.log: list[int] = []

    def compile(self, kernel: KernelOp, schedule: Schedule) -> FakeKernel:
        if schedule.warps == 1:
            raise RuntimeError("out of registers")
        return FakeKernel(self.log, schedule)

    def propose(self, kernel: KernelOp, sizes: dict[str, int]) -> list[Schedule]:
        return SCHEDULES

    def no_sums_over_rows(self, row: int | None) -> str:
        return ""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))


def pretend(run, device: torch.device) -> float:
    """More warps, less time."""
    run()
    return 1.0 / run.args[0].schedule.warps


def test_first_proposal_without_tuning() -> None:
    target, case = FakeTarget(), kernels.pointwise(100, dynamic=True)
    assert autotune.choose(target, case.kernel, {"n": 100}, case.tensors) == SCHEDULES[0]
    assert target.log == [] and list(cache.entries()) == []


def test_fastest_is_chosen_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "seconds", pretend)
    target, case = FakeTarget(), kernels.pointwise(100, dynamic=True)
    before = [t.clone() for t in case.tensors]
    with override(autotune=True):
        assert autotune.choose(target, case.kernel, {"n": 100}, case.tensors) == SCHEDULES[2]
        assert target.log == [2, 4]
        assert autotune.choose(target, case.kernel, {"n": 101}, case.tensors) == SCHEDULES[2]
        assert target.log == [2, 4], "a size of the same class is known"
        autotune.choose(target, case.kernel, {"n": 1000}, case.tensors)
        assert target.log == [2, 4, 2, 4], "a size of another class is measured"
    for t, b in zip(case.tensors, before, strict=True):
        assert torch.equal(t, b), "measuring works on copies"


def test_real_clock_on_the_cpu() -> None:
    target, case = FakeTarget(), kernels.pointwise(100, dynamic=True)
    with override(autotune=True):
        assert autotune.choose(target, case.kernel, {"n": 100}, case.tensors) in SCHEDULES[1:]
    assert target.log.count(2) == autotune.WARM_UP + autotune.TURNS


def test_nothing_compiles() -> None:
    target = FakeTarget()
    case = kernels.pointwise(100)
    assert autotune.measure(target, case.kernel, {}, case.tensors, SCHEDULES[:1]) == SCHEDULES[0]


def test_damaged_or_foreign_entry_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "seconds", pretend)
    target, case = FakeTarget(), kernels.pointwise(100, dynamic=True)
    key = autotune.tuning_key(target, case.kernel, {"n": 100}, torch.device("cpu"))
    for data in (b"not json", b"{}", b'{"blocks": [], "extra": [], "unknown": 1}'):
        cache.store(autotune.KIND, key, data)
        with override(autotune=True):
            assert autotune.choose(target, case.kernel, {"n": 100}, case.tensors) == SCHEDULES[2]


def test_key_tells_apart_what_matters() -> None:
    target, cpu = FakeTarget(), torch.device("cpu")
    a, b = kernels.pointwise(100, dynamic=True).kernel, kernels.full_sum(100, dynamic=True).kernel
    keys = {
        autotune.tuning_key(target, a, {"n": 100}, cpu),
        autotune.tuning_key(target, b, {"n": 100}, cpu),
        autotune.tuning_key(target, a, {"n": 112}, cpu),
        autotune.tuning_key(target, a, {"n": 300}, cpu),
    }
    assert len(keys) == 4
    again = kernels.pointwise(100, dynamic=True).kernel
    assert autotune.tuning_key(target, again, {"n": 100}, cpu) in keys


@pytest.mark.parametrize("schedule", [*SCHEDULES, Schedule(loop=True, split=4, group=8, stages=3)])
def test_schedules_as_text(schedule: Schedule) -> None:
    assert autotune.from_text(autotune.to_text(schedule)) == schedule


def test_copies_keep_strides() -> None:
    expanded = torch.arange(3.0).expand(2, 3)
    rows = torch.arange(20.0)[3:].as_strided((2, 3), (5, 1))
    for t in (expanded, rows, torch.zeros(0, 3).t(), torch.arange(6.0).reshape(2, 3).t()):
        copy = autotune._strided_copy(t)
        assert torch.equal(copy, t) and copy.stride() == t.stride() and copy.data_ptr() != t.data_ptr() or not t.numel()


# --- cost ---


def test_bytes_and_flops() -> None:
    assert cost(kernels.pointwise(1000).kernel, {}) == Cost(8000, 4000, 4000, 0)
    rows = cost(kernels.softmax(2, 2, torch.bfloat16, dynamic=True).kernel, {"n": 16384, "m": 8192})
    assert rows.bytes == 2 * 16384 * 8192 * 2
    halves = cost(kernels.silu_mul(8, 16).kernel, {})
    assert (halves.read, halves.written) == (8 * 32 * 2, 8 * 16 * 2)
    turned = cost(kernels.rotary(2, 5, 3, 8).kernel, {})
    assert turned.read == (2 * 5 * 3 * 8 + 2 * 5 * 8) * 2, "both halves of a row are read once"
    product = cost(kernels.matmul(64, 32, 16).kernel, {})
    assert product.matrix_flops == 2 * 64 * 32 * 16


def test_roofline() -> None:
    rows = cost(kernels.softmax(2, 2, torch.bfloat16, dynamic=True).kernel, {"n": 16384, "m": 8192})
    assert roofline(rows, machine("h200")) == pytest.approx(0.134e-3, rel=0.01)
    product = cost(kernels.matmul(2, 2, 2, dynamic=True).kernel, {"m": 8192, "n": 8192, "p": 8192})
    assert roofline(product, machine("h200")) == pytest.approx(2 * 8192**3 / 7.9e14, rel=0.05)


def test_fake_target_is_a_target() -> None:
    target: Target = FakeTarget()
    assert target.name == "fake"
