"""Weights from a file's pages to a GPU, at the speed of the link.

PyTorch copies pageable memory by one thread, which waits for every page of the file. Here several threads copy pieces
into pinned memory, from where the GPU fetches them while the next pieces come.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

PIECE = 16 << 20
SMALL = 8 * PIECE  # below it threads gain nothing
MOST = 8  # threads
Piece = tuple[Tensor, Tensor]  # bytes there, bytes here


def uploaded(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The same tensors on a device."""
    many = [name for name, x in tensors.items() if x.is_contiguous() and x.numel()]
    total = sum(tensors[name].nbytes for name in many)
    if device.type != "cuda" or total < SMALL:
        return {name: x.to(device) for name, x in tensors.items()}
    there = {name: torch.empty_like(tensors[name], device=device) for name in many}
    left = iter([piece for name in many for piece in pieces(there[name], tensors[name])])  # each thread takes the next
    ready = torch.cuda.current_stream(device).record_event()  # the memory may have had another owner
    threads = min(MOST, os.cpu_count() or 1, -(-total // PIECE))
    with ThreadPoolExecutor(threads) as pool:
        for copied in [pool.submit(_copy, left, device, ready) for _ in range(threads)]:
            copied.result()
    return {name: there[name] if name in there else x.to(device) for name, x in tensors.items()}


def pieces(there: Tensor, here: Tensor) -> Iterator[Piece]:
    """The bytes of two contiguous tensors, piece by piece."""
    to, of = (x.reshape(-1).view(torch.uint8) for x in (there, here))
    yield from zip(to.split(PIECE), of.split(PIECE), strict=True)


def _copy(left: Iterator[Piece], device: torch.device, ready: torch.cuda.Event) -> None:
    """Pieces through two pinned buffers in turn, until none is left."""
    stream = torch.cuda.Stream(device)
    stream.wait_event(ready)
    buffers = [(torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for (there, here), (buffer, fetched) in zip(left, cycle(buffers), strict=False):
            fetched.synchronize()
            np.copyto(buffer[: len(here)].numpy(), here.numpy())  # lets other threads run meanwhile
            there.copy_(buffer[: len(here)], non_blocking=True)
            fetched.record()
    stream.synchronize()
