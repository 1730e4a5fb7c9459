"""Weights in fewer bits: packed and back, and what a group loses."""

from __future__ import annotations

import pytest
import torch

from tessera.ops import quantized


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n", [16, 40, 3])
def test_packing_loses_nothing(bits: int, n: int) -> None:
    half = 2 ** (bits - 1)
    whole = torch.randint(-half, half, (n, 384), dtype=torch.int16)
    made = quantized.packed(whole, bits)
    assert made.shape == (-(-n // 16), 2 * 384 * bits) and made.dtype == torch.int8
    back = quantized.unpacked(made, bits)
    assert torch.equal(back[:n], whole) and (back[n:] == 0).all()


def test_a_thread_has_two_rows_of_eight_columns() -> None:
    """The first sixteen bytes of a block: rows 0 and 8, columns 0 to 7, and with four bits 64 to 71."""
    whole = torch.arange(16)[:, None] % 4 + torch.arange(128)[None, :] // 64 * 4 - 4
    first = quantized.packed(whole.to(torch.int16), 4)[0, :16]
    low, high = first << 4 >> 4, first >> 4
    assert low.tolist() == [-4] * 16 and high.tolist() == [0] * 16
    numbers = torch.arange(16, dtype=torch.int16)[:, None].expand(16, 128)
    assert quantized.packed(numbers, 8)[0, :16].tolist() == [0] * 8 + [8] * 8


@pytest.mark.parametrize(("kind", "steps"), [("int8", 127), ("int4", 7)])
def test_a_weight_is_off_by_half_a_step_of_its_group(kind: str, steps: int) -> None:
    weight = torch.randn(20, 256)
    made, scale = quantized.quantized(weight, kind)
    off = (quantized.dequantized(made, scale, kind) - weight).abs().unflatten(1, (-1, quantized.GROUP)).amax(2)
    top = weight.abs().unflatten(1, (-1, quantized.GROUP)).amax(2)
    assert (off <= top / steps * (0.5 + 2.0**-8 * steps)).all()


@pytest.mark.parametrize("kind", quantized.KINDS)
def test_a_layers_shape_is_known_without_running_it(kind: str) -> None:
    weight, scale = quantized.quantized(torch.randn(20, 256), kind)
    meta = [t.to("meta") for t in (torch.randn(2, 3, 256), weight, scale)]
    assert torch.ops.tessera.quantized_linear(*meta, None, kind).shape == (2, 3, 20)
