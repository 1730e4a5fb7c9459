"""Kernels that are compiled ahead of their first call, several at a time.

In: a device and something that compiles. Out: a future. Triton's passes and the assembler run without Python's lock, so
threads compile side by side while the rest of a program is still being made.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

MOST = 8  # kernels at a time


@functools.cache
def _pool() -> tuple[ThreadPoolExecutor, Future]:
    """The threads, and what all of them wait for first."""
    from triton.runtime import driver
    from triton.runtime.cache import triton_key

    driver.active.get_current_target()  # the driver is set up once, and not by several threads at a time
    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, MOST), thread_name_prefix="tessera-compile")
    return pool, pool.submit(triton_key)  # reads all of Triton's libraries (0.4 s): once, too


def begin(device: torch.device, compile_: Callable[[], object]) -> Future:
    """Compile for a device in the background. Whoever waits for the future sees what went wrong."""
    pool, ready = _pool()

    def work() -> object:
        ready.result()
        with torch.cuda.device(device):
            return compile_()

    return pool.submit(work)
