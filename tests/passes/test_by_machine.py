"""Rewrites that pay on one GPU and not on another follow the figures of the machine at hand."""

from __future__ import annotations

import pytest
import torch

from tessera.ir.equation import Value
from tessera.ir.types import TensorType
from tessera.machines import machine
from tessera.passes.patterns.align import COLUMNS, DEPTH, ROWS, Operand, Product
from tessera.passes.patterns.resample import Gradient
from tessera.util.config import override

CUDA = torch.device("cuda", 0)


def value(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Value:
    strides = tuple(torch.empty(shape, device="meta").stride())
    return Value("x", TensorType(dtype, shape, strides, CUDA))


def padding_pays(rows: int, depth: int, columns: int, on: str) -> bool:
    left = Operand(value(rows, depth), (ROWS, DEPTH), False)
    right = Operand(value(depth, columns), (DEPTH, COLUMNS), False)
    product = Product(left, right, {ROWS: rows, DEPTH: depth, COLUMNS: columns}, {ROWS: 0, DEPTH: 0, COLUMNS: 7})
    with override(machine=on):
        return product.pays(2, CUDA)


def products_pay(side: int, factor: int, on: str) -> bool:
    out = (side * factor,) * 2
    ct = value(8, 64, *out)
    with override(machine=on):
        return Gradient(ct, out, (side, side), False, (None, None), (0, 1, 2, 3)).pays()


@pytest.mark.parametrize("on", ["h200", "a100"])
def test_an_odd_vocabulary_is_padded_and_a_small_layer_is_not(on: str) -> None:
    assert padding_pays(8192, 4096, 50257, on)
    assert not padding_pays(16, 64, 21, on)


def test_slower_matrix_units_wait_less_for_narrow_loads() -> None:
    """What aligned rows would save, as a share of the whole, is less where the units are slower."""
    assert padding_pays(2048, 64, 50257, "h200") != padding_pays(2048, 64, 50257, "l40s")


def test_gradients_of_interpolation_are_products_where_matrix_units_are_fast() -> None:
    assert products_pay(128, 4, "h200")
    assert [products_pay(side, 2, on) for side in (64, 512) for on in ("h200", "rtx3090")] == [True, True, True, False]


def test_a_launch_is_the_machines_where_it_was_measured() -> None:
    assert machine("h200").launch == 4e-6
