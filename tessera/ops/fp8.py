"""Products of 8-bit floats: what they are made of, how far off they may be, and which devices have them.

Numbers are e4m3: three bits of mantissa, at most 448. A row is divided by its scale, its largest magnitude over 448, so
that it fills that range; `aten._scaled_mm` multiplies two such matrices and their scales. A number is then off by at
most 2**-4 of itself or, where it is smaller than 2**-6 scales, by 2**-10 scales. So a product with weights `w` as they
are stored is off by at most

    ERROR * |x| · |w|  +  FLOOR * max|x| * sum|w|

for each of its elements, the sums and the rounding to 16 bits included.
"""

from __future__ import annotations

import functools

import torch

from tessera.ops.matmul import product_cost
from tessera.ops.op import declare
from tessera.util.config import config

EIGHT_BITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # and the largest number of each
LARGEST = EIGHT_BITS[torch.float8_e4m3fn]
LEAST = 1e-12  # a row's largest magnitude counts as no less: rows of zeros have a scale too
ERROR = 0.08  # 2**-4 from rounding x, the rest from sums in fewer bits and the result's 16
FLOOR = 2.0**-10 / LARGEST


def in_hardware(device: torch.device) -> bool:
    """The device multiplies and converts numbers of 8 bits itself. Where there is none to ask, programs are made for
    one that does."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 9)


def refusal(device: torch.device) -> str:
    """Why linear layers with weights of 8 bits are not multiplied in 8 bits there; empty where they are."""
    match config.fp8_matmul:
        case "on":
            return ""
        case "off":
            return "the flag fp8_matmul is off"
    if device.type != "cuda":
        return f"{device.type} gains nothing from it"
    return "" if in_hardware(device) else f"{device} has no numbers of 8 bits"


@functools.cache
def scales_rows(kind: str) -> bool:
    """`aten._scaled_mm` takes a scale for each row on this kind of device; on the CPU older PyTorch does not."""
    if kind != "cpu":
        return True
    x, scale = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch.ops.aten._scaled_mm(x, x.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


declare("aten._scaled_mm", "matmul", cost=product_cost(0))
