"""Processes of a gloo group, started quickly: one server has imported everything, ranks are its forks."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.checkpoint.state_dict", "tests.distributed.warm"])


def start(world: int, fn: Callable, *args: object, seconds: float = 120) -> list[int | None]:
    """Run `fn(rank, *args)` in so many processes; their exit codes, None for one that had to be stopped."""
    ranks = [_CONTEXT.Process(target=fn, args=(rank, *args)) for rank in range(world)]
    for process in ranks:
        process.start()
    end = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    return codes


def join_group(rank: int, world: int, meet: str, seconds: float = 120) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), GLOO_SOCKET_IFNAME="lo")  # whatever the host is called
    torch.set_num_threads(1)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world, timeout=limit)
