"""A kernel's code is the same in every process: what one keeps on disk, another finds."""

from __future__ import annotations

import os
import subprocess
import sys

from hosts import NEOVERSE_N1

from tessera.tile.dialect.build import KernelBuilder, f32
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.cpu.layout import layout
from tessera.tile.targets.cpu.stages import keep_between, stages
from tessera.tile.targets.cpu.target import module_text


def kept_twice() -> KernelOp:
    """Two values that a first loop computes and a second one needs."""
    k = KernelBuilder("kept_twice")
    i, r = k.axis("i", 8), k.axis("r", 100, reduce=True)
    x, o = k.buffer(f32), k.buffer(f32)
    a = k.apply("exp", k.load(x, i * 100 + r))
    b = k.apply("sin", k.load(x, i * 100 + r))
    total = k.apply("add", k.reduce("sum", a, "r"), k.reduce("sum", b, "r"))
    k.store(k.apply("mul", k.apply("mul", b, a), total), o, i * 100 + r)
    return k.finish()


def test_what_is_taken_from_scratch_comes_in_the_order_of_its_use():
    """Not in that of a set, which goes by addresses."""
    for _ in range(8):
        seen = layout(kept_twice())
        _, listed = stages(seen, "r")
        keep_between(listed)
        (taken,) = (stage.take for stage in listed if stage.take)
        assert [v.owner.fn.data for v in taken] == ["sin", "exp"]


SCRIPT = """
import torch
from kernels import softmax
from test_same_code import *
from tessera.tile.targets.cpu.target import CpuTarget

print(module_text(kept_twice(), Schedule(), NEOVERSE_N1))
case = softmax()
CpuTarget().compile(case.kernel, Schedule())(case.tensors)
assert torch.allclose(case.tensors[1], case.expected[1])
"""


def test_another_process_makes_the_same_text_runs_kernels_and_exits_quietly(tmp_path):
    env = {**os.environ, "PYTHONHASHSEED": "7", "TESSERA_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0 and done.stdout == module_text(kept_twice(), Schedule(), NEOVERSE_N1) + "\n", (
        done.stderr
    )
