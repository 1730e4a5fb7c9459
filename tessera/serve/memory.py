"""How many blocks the cache gets.

In: the layers, the device, and a share of its free memory or a number of bytes. Out: blocks for each group of layers.
Groups without a window get as many as fit; one with a window no more than all running sequences can own.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tessera.serve.programs import Layer, groups_of
from tessera.util.errors import OptionError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Plan:
    """Blocks and bytes of every group, and what there was to share out."""

    windows: tuple[int, ...]
    blocks: tuple[int, ...]
    bytes_each: tuple[int, ...]  # of a block, in all layers of its group
    offered: int

    @property
    def bytes(self) -> int:
        return sum(count * each for count, each in zip(self.blocks, self.bytes_each, strict=True))

    def lines(self, block_size: int) -> list[str]:
        """The plan in words."""
        lines = [f"cache: {self.bytes:,} of {self.offered:,} bytes offered"]
        for window, blocks, each in zip(self.windows, self.blocks, self.bytes_each, strict=True):
            reach = f"layers that look {window} tokens back" if window else "layers that look back to the beginning"
            lines.append(f"  {reach}: {blocks} blocks of {block_size} tokens, {each:,} bytes each")
        return lines


def free_bytes(device: torch.device) -> int:
    """What the device has left now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def bytes_of(memory: float | int | str, device: torch.device) -> int:
    """A share of what is free (0.9), or bytes (10**9, "8GB")."""
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B)?\s*", memory.upper())
        if match is None:
            raise OptionError(f'memory: expected a share, bytes or text such as "8GB", got {memory!r}')
        return int(float(match[1]) * _UNITS[match[2] or ""])
    if not memory > 0:
        raise OptionError(f"memory: expected more than 0, got {memory!r}")
    return int(memory * free_bytes(device)) if memory <= 1 else int(memory)


@contextmanager
def in_words(plan: Plan | None = None, weights: int = 0) -> Iterator[None]:
    """Where memory runs out: what took how much of it, and which options help."""
    try:
        yield
    except RuntimeError as error:  # PyTorch has no class of its own for memory of the host
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        first = re.split(r"[.\n]", str(error))[0]
        if plan is None:
            told = "while weights were loaded; a smaller model fits, or one that was exported with quantize"
        else:
            told = (
                f"weights take {weights:,} bytes, the cache {plan.bytes:,} of {plan.offered:,} offered; less memory=, "
                "quantize=, cache_dtype='fp8', fewer most_running or a smaller longest help"
            )
        raise OptionError(f"memory: {first}: {told}") from error


def plan(
    layers: Sequence[Layer], block_size: int, offered: int, item: int, running: int, longest: int, step: int
) -> Plan:
    """Share `offered` bytes out for `running` sequences of at most `longest` tokens, `step` of them new at a time."""
    windows = groups_of(layers)
    token = [sum(x.heads * (x.head + x.value_head) for x in layers if x.window == window) for window in windows]
    each = [numbers * block_size * item for numbers in token]

    def wanted(window: int, tokens: int) -> int:
        """Blocks with which all sequences can run, if nothing shortens memory."""
        longest_seen = min(tokens, window + step) if window else tokens
        return running * (-(-longest_seen // block_size) + 1)

    most = [wanted(window, longest) for window in windows]

    def taken(count: int) -> int:
        """Bytes, where every group has its most or so many blocks, and block 0 besides."""
        return sum((min(count, m) + 1) * e for m, e in zip(most, each, strict=True))

    low = bisect_right(range(max(most) + 1), offered, key=taken) - 1
    if low < 2:
        raise OptionError(
            f"memory: {offered:,} bytes are offered for the cache, in which a block of {block_size} tokens takes "
            f"{sum(each):,}; expected room for at least 3: offer more memory, or take smaller blocks"
        )
    return Plan(tuple(windows), tuple(min(low, m) for m in most), tuple(each), offered)
