"""Kernels over rows keep their tiles in registers: what is proposed first, compiled for a GPU that is not here.

Some sizes run always, the others are marked sweep.
"""

from __future__ import annotations

import pytest
import torch
from row_kernels import PROGRAMS, kernels_of

from tessera.tile.targets import missing

pytestmark = pytest.mark.skipif(bool(missing("triton")), reason=missing("triton"))

BF16, F32 = torch.bfloat16, torch.float32
ALWAYS = [(BF16, 32000), (BF16, 128256), (F32, 32768)]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32000, 32768, 65536, 128256)
MORE = [(dtype, row) for dtype in (BF16, F32) for row in LENGTHS if (dtype, row) not in ALWAYS]

# A row of 16K elements and more that is held whole leaves few registers to work with. Some tens of bytes a thread are
# parked once a row; walking the row instead would read all of it again.
PARKED, LONG = 64, 16384


def sizes(chosen: list[tuple[torch.dtype, int]]) -> list:
    return [pytest.param(dtype, row, id=f"{str(dtype)[6:]}-{row}") for dtype, row in chosen]


def check(name: str, dtype: torch.dtype, row: int) -> None:
    from tessera.tile.targets.triton.resources import compile_only

    found = 0
    for kernel, schedule in kernels_of(name, 4096, row, dtype):
        used = compile_only(kernel, schedule, 90)
        whole = not schedule.loop and max((n for _, n in schedule.blocks), default=1) >= LONG
        assert used.spills <= (PARKED if whole else 0), (kernel.sym_name.data, schedule, used)
        assert used.shared <= 227 * 1024, (kernel.sym_name.data, schedule, used)
        found += 1
    assert found


@pytest.mark.parametrize(("dtype", "row"), sizes(ALWAYS))
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_stay_in_registers(name: str, dtype: torch.dtype, row: int) -> None:
    check(name, dtype, row)


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "row"), sizes(MORE))
@pytest.mark.parametrize("name", PROGRAMS)
def test_more_rows_stay_in_registers(name: str, dtype: torch.dtype, row: int) -> None:
    check(name, dtype, row)


@pytest.mark.parametrize("name", ["softmax", "cross_entropy"])
def test_few_rows_in_parts_stay_in_registers(name: str) -> None:
    from tessera.tile.targets.triton.resources import compile_only

    halves = list(kernels_of(name, 8, 128256, BF16))
    assert len(halves) == 2
    assert all(compile_only(kernel, schedule, 90).spills == 0 for kernel, schedule in halves)
