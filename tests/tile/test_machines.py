"""Machines that are not here: what is proposed for each compiles, fits it, and computes the right thing.

Every architecture with every kind of kernel is marked sweep; always tried are those that shared memory is tightest for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import machine_kernels as kinds
import pytest
from interpreted import run_interpreted

from tessera.machines import machine
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.targets import missing, named

pytestmark = pytest.mark.skipif(bool(missing("triton")), reason=missing("triton"))

MACHINES = ("a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090")  # sm_80, 86, 89, 90, 100, 120
KERNELS: dict[str, Callable[[], KernelOp]] = {
    "pointwise": lambda: kinds.pointwise(1 << 24),
    "row sum": lambda: kinds.row_sum(4096, 4096),
    "softmax": lambda: kinds.softmax(2048, 32768),
    "norm backward": lambda: kinds.norm_backward(4096, 8192),
    "column sum": lambda: kinds.column_sum(16384, 8192),
    "product": lambda: kinds.product(4096, 1024, 768),
    "large product": lambda: kinds.product(8192, 8192, 8192),
    "attention": lambda: kinds.many_queries(128),
    "decoding": lambda: kinds.few_queries(128),
}
ALWAYS = [("rtx3090", "product"), ("rtx5090", "large product"), ("a100", "norm backward"), ("rtx4090", "decoding")]
PARKED = 128  # bytes a thread may keep in local memory: written once, outside of loops


def check(key: str, name: str) -> None:
    from row_kernels import pieces

    from tessera.tile.targets.triton.resources import compile_only

    m, kernel = machine(key), KERNELS[name]()
    target = named("triton", m)
    assert target is not None
    schedule = target.propose(kernel, kinds.sizes_of(kernel))[0]
    for part, own in pieces(kernel, schedule):
        used = compile_only(part, own, m.capability)
        told = (part.sym_name.data, own, str(used))
        assert used.shared <= m["shared_block"], told
        assert used.spills <= PARKED and used.registers <= m["registers_thread"], told
        assert 32 * used.warps <= 1024 and 32 * used.warps * used.registers <= m["registers"], told


@pytest.mark.parametrize(("key", "name"), ALWAYS)
def test_the_first_proposal_fits(key: str, name: str) -> None:
    check(key, name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("key", MACHINES)
def test_every_first_proposal_fits(key: str, name: str) -> None:
    check(key, name)


@pytest.mark.parametrize("key", MACHINES)
def test_every_kernel_has_proposals_that_fit(key: str) -> None:
    """By the estimate alone, which costs nothing."""
    from tessera.tile.targets.triton.fit import shared

    m = machine(key)
    target = named("triton", m)
    assert target is not None
    for make, every in kinds.LARGE.items():
        for sizes in every:
            kernel = make(*sizes)
            found = target.propose(kernel, kinds.sizes_of(kernel))
            assert found, (make.__name__, sizes)
            for schedule in found:
                assert shared(kernel, schedule, schedule.stages, m) <= m["shared_block"] and schedule.warps <= 32
                assert m.copies_in_bulk or not schedule.persistent


def test_parts_follow_the_number_of_multiprocessors() -> None:
    few, many = (named("triton", machine(key)) for key in ("rtx3090", "rtx5090"))
    assert few is not None and many is not None
    kernel = kinds.column_sum(16384, 8192)
    assert few.propose(kernel, {})[0].split < many.propose(kernel, {})[0].split


@pytest.mark.sweep
def test_right_under_the_interpreter(tmp_path: Path) -> None:
    """For every described GPU."""
    printed = run_interpreted(Path(__file__).with_name("machine_cases.py"), TESSERA_CACHE=str(tmp_path))
    report = json.loads(printed.splitlines()[-1])
    assert report.pop("tried") > 8, "machines differ in what is proposed"
    assert set(MACHINES) <= set(report) and not any(report.values()), report
