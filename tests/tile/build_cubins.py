"""Builds what the tests of cuTile launch on a GPU, for a machine that has a GPU but no CUDA Tile compiler.

TESSERA_CACHE=.cubins PYTHONPATH=tests python tests/tile/build_cubins.py sm_90
TESSERA_CACHE=.cubins python -m pytest -m gpu tests/tile/test_cuda_tile.py tests/tile/test_attention.py    # there
"""

from __future__ import annotations

import sys

import attention_cases
import torch
from on_h200 import CUDA_TILE as TARGET
from test_attention import cutile_schedule
from test_cuda_tile import CASES, schedules

from tessera.tile.targets.cuda_tile.arrays import Variant
from tessera.tile.targets.cuda_tile.target import kernels_of


def main(arch: str) -> None:
    for name, case in CASES.items():
        for schedule in schedules(case):
            for kernel in kernels_of(TARGET.compile(case.kernel, schedule)):
                for aligned in (True, False):
                    kernel.build(arch, Variant(aligned))
        print(name, "built", flush=True)
    for case in (*attention_cases.CASES, *attention_cases.LONGER):
        for kernel, _, _ in attention_cases.calls(case, torch.bfloat16).calls:
            for found in kernels_of(TARGET.compile(kernel, cutile_schedule(kernel))):
                for aligned in (True, False):
                    found.build(arch, Variant(aligned))
        print(case, "built", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
