"""What the kernels over few rows take, where they run, and what of the machine their plans read.

In: types of a program's values. Out: whether the kernels take them. Patterns ask before they rewrite, the executor
before it claims; no other file repeats a limit.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os

import torch

from tessera.ir.types import TensorType, settled
from tessera.machines import machine, machine_of

DTYPES = (torch.bfloat16, torch.float16)
POSITIONS = (torch.int64, torch.int32)
ROWS = 16
WEIGHTS = 3  # that one launch reads
COLUMNS = 64  # the width of a weight is a multiple of it
HEADS = (32, 64, 128, 256)  # widths of a head
LENGTHS = (1, 2)  # where a cache has its length: (batch, length, heads, head) and (batch, heads, length, head)


@functools.cache
def has_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ImportError:  # whoever forbids it
        return False


def runs(device: torch.device) -> bool:
    """There are kernels for this device."""
    return device.type == "cuda" and has_triton()


def interpreted() -> bool:
    """Kernels run as Python on the CPU: Triton's interpreter, for tests. It knows no assembly."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def early() -> dict[str, bool]:
    """A kernel may begin while the one before it ends, where the chip can: it waits before it reads anything new."""
    able = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


@functools.cache
def units(device: torch.device) -> int:
    """Multiprocessors to keep busy; interpreted kernels are planned for the GPU they were measured on."""
    return (machine_of(device) if device.type == "cuda" else machine("h200")).units


def few_rows(x: TensorType) -> bool:
    """Rows that are known to be few, in 16 bits; how many may be known at run time alone."""
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    few = settled(rows > 0) and settled(rows <= ROWS)
    return bool(few) and x.dtype in DTYPES and type(width) is int and width % COLUMNS == 0


def linear(x: TensorType, weight: TensorType, bias: TensorType | None, quantized: bool) -> bool:
    """A product of few rows and a weight that lies row by row, of the same type or quantized."""
    static = len(weight.shape) == 2 and all(type(n) is int for n in weight.shape)
    same = quantized or weight.dtype == x.dtype
    plain = bias is None or bias.stride == (1,)
    return static and same and plain and weight.stride == (weight.shape[1], 1) and few_rows(x) and runs(x.device)


def attention(q: TensorType, k: TensorType, v: TensorType) -> bool:
    """One query a head; the cache may be of any length."""
    tensors, head = (q, k, v), q.shape[-1]
    if not all(t.dtype in DTYPES and len(t.shape) == 4 and t.shape[-1] == head for t in tensors):
        return False
    if not all(type(n) is int for n in (*q.shape, *k.shape[:2], *v.shape[:2])) or q.shape[2] != 1 or head not in HEADS:
        return False
    shared = int(q.shape[1]) % int(k.shape[1]) == 0 and k.shape[1] == v.shape[1]
    return shared and k.shape[0] == q.shape[0] == v.shape[0] and all(t.stride[-1] == 1 for t in tensors)


def cache(t: TensorType, dim: int) -> bool:
    """A cache with its length at `dim`; only that may be known at run time alone."""
    if len(t.shape) != 4 or dim not in LENGTHS or t.dtype not in DTYPES or t.stride[-1] != 1:
        return False
    return all(type(n) is int for i, n in enumerate(t.shape) if i != dim) and t.shape[-1] in HEADS
