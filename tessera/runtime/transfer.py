"""Copies between a GPU and the host that run beside the program: the CUDA side of `ops/offload`.

One stream a device carries the copies of both directions, so that they follow one another. A copy begins when the
program's stream has come to the place where it stands (only then is its source written, or its destination's memory
free), and the program's stream waits for it where the pair's second operator stands; the host waits for neither. Until
then the tensor on the device is held here: were the program to fail in between, its memory would not be given away
under a running copy. Host memory is pinned and comes from PyTorch's own pool, which takes blocks back when a tensor
dies and its last copy is done: from the second step on nothing is allocated.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tessera.ops.offload import from_host, library, like

_running: dict[int, tuple[torch.cuda.Event, Tensor]] = {}  # address of a copy's result -> its end, and what it holds


@functools.cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream that a device's copies run on."""
    return torch.cuda.Stream(device)


def _begin(source: Tensor, target: Tensor, held: Tensor) -> Tensor:
    device = held.device
    side = stream_of(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    for address, (done, _) in list(_running.items()):  # left over by programs that failed
        if done.query():
            _running.pop(address, None)
    _running[target.data_ptr()] = side.record_event(), held
    return target


def _end(target: Tensor) -> Tensor:
    if (copy := _running.pop(target.data_ptr(), None)) is not None:
        done, held = copy
        torch.cuda.current_stream(held.device).wait_event(done)
    return target


def _to_host(x: Tensor) -> Tensor:
    return _begin(x, like(x, torch.device("cpu"), pinned=True), held=x)


def _sent(h: Tensor, x: Tensor) -> Tensor:
    return _end(h)


def _from_host(h: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return from_host(h, device)
    x = like(h, device)
    return _begin(h, x, held=x)


library.impl("to_host", _to_host, "CUDA")
library.impl("sent", _sent, "CUDA")
library.impl("from_host", _from_host, "CPU")  # by its argument, which is on the host
library.impl("arrived", _end, "CUDA")
