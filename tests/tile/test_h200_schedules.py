"""What is proposed on an H200, where the numbers were measured: the same whatever is said of other machines.

The golden file holds, for every kernel, the first proposal and a digest of all of them;
`python tests/tile/test_h200_schedules.py` writes it anew.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import machine_kernels
import pytest
from on_h200 import CUDA_TILE, H200, TRITON

from tessera.executors.attention import parts_for
from tessera.tile.dialect.build import bf16, f32
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets import Target, missing

GOLDEN = Path(__file__).parent / "goldens" / "h200_schedules.json"
pytestmark = pytest.mark.skipif(bool(missing("triton")), reason=missing("triton"))


def brief(schedule: Schedule) -> str:
    switches = [f"{name}={value}" for name, value in schedule.extra]
    marks = [name for name in ("loop", "persistent") if getattr(schedule, name)]
    numbers = f"warps={schedule.warps} stages={schedule.stages} split={schedule.split} group={schedule.group}"
    return " ".join([*(f"{axis.replace(' ', ',')}={n}" for axis, n in schedule.blocks), numbers, *marks, *switches])


def told(schedules: list[Schedule]) -> str:
    lines = [brief(s) for s in schedules]
    return f"{lines[0]} # {len(lines)}, {hashlib.sha256(repr(lines).encode()).hexdigest()[:8]}"


def proposed(target: Target) -> dict[str, str]:
    found: dict[str, str] = {}
    for make, every in machine_kernels.LARGE.items():
        for sizes in every:
            for name, element in (("bf16", bf16), ("f32", f32)):
                kernel = make(*sizes, element)
                key = f"{make.__name__} {'x'.join(map(str, sizes))} {name}"
                found[key] = told(target.propose(kernel, machine_kernels.sizes_of(kernel)))
    for loads in (2, 4, 10):
        kernel = machine_kernels.column_sum(16384, 8192, bf16, loads)
        found[f"column_sum of {loads}"] = told(target.propose(kernel, {}))
    return found


@pytest.mark.parametrize("target", [TRITON, CUDA_TILE], ids=["triton", "cuda_tile"])
def test_proposals_are_those_that_were_measured(target: Target) -> None:
    expected = json.loads(GOLDEN.read_text())[target.name]
    found = proposed(target)
    assert found.keys() == expected.keys()
    assert {key: found[key] for key in found if found[key] != expected[key]} == {}


def test_keys_are_shared_out_as_measured() -> None:
    assert [parts_for(groups, 8192, H200) for groups in (1, 8, 32, 264, 1000)] == [32, 32, 8, 1, 1]
    assert [parts_for(8, keys, H200) for keys in (256, 1024, 4096)] == [2, 8, 32]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({t.name: proposed(t) for t in (TRITON, CUDA_TILE)}, indent=1) + "\n")
