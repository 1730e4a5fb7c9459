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

from tessera.ir.equation import Equation
from tessera.ir.schema import is_view
from tessera.ir.types import TensorType
from tessera.ops.matmul import product_cost
from tessera.ops.op import declare
from tessera.torch_internals.fake import unset_fake_temporarily
from tessera.util.config import config

EIGHT_BITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # and the largest number of each
LARGEST = EIGHT_BITS[torch.float8_e4m3fn]
FEW_ROWS = 16  # up to here reading the weights is all the work
WHOLE = 16  # the library multiplies matrices whose sides are multiples of this
LEAST = 1e-12  # a row's largest magnitude counts as no less: rows of zeros have a scale too
ERROR = 0.08  # 2**-4 from rounding x, the rest from sums in fewer bits and the result's 16
FLOOR = 2.0**-10 / LARGEST


def rounds(eqn: Equation) -> bool:
    """Numbers of 8 bits are made here. They are half of what they are made of: rather kept than made again."""
    return any(isinstance(v.type, TensorType) and v.type.dtype in EIGHT_BITS for v in eqn.results()) and not is_view(
        eqn.op
    )


def in_hardware(device: torch.device) -> bool:
    """The device multiplies and converts numbers of 8 bits itself. Where there is none to ask, programs are made for
    one that does."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 9)


def lacking(device: torch.device) -> str:
    """Why a device has no products of 8 bits, though the user wants them; empty where it has. A CPU computes them."""
    return "" if device.type != "cuda" or in_hardware(device) else f"{device} has no numbers of 8 bits"


def refusal(device: torch.device) -> str:
    """Why linear layers with weights of 8 bits are not multiplied in 8 bits there; empty where they are."""
    match config.fp8_matmul:
        case "on":
            return ""
        case "off":
            return "the flag fp8_matmul is off"
    if device.type != "cuda":
        return f"{device.type} gains nothing from it"
    return lacking(device)


@functools.cache
def multiplies(kind: str, left: torch.dtype = torch.float8_e4m3fn, rows: bool = True) -> bool:
    """`aten._scaled_mm` multiplies a matrix of this dtype and one of e4m3 on this kind of device, with a scale for each
    row or one for each matrix. On the CPU older PyTorch does not do all of it."""
    if kind != "cpu":
        return True
    with unset_fake_temporarily():
        a, b = torch.zeros(16, 16).to(left), torch.zeros(16, 16).to(torch.float8_e4m3fn)
        scale = torch.ones(16, 1) if rows else torch.ones(())
        try:
            torch.ops.aten._scaled_mm(a, b.t(), scale, scale.t(), out_dtype=torch.bfloat16)
        except (RuntimeError, ValueError):
            return False
    return True


def scales_rows(kind: str) -> bool:
    """`aten._scaled_mm` takes a scale for each row on this kind of device."""
    return multiplies(kind)


declare("aten._scaled_mm", "matmul", cost=product_cost(0))
