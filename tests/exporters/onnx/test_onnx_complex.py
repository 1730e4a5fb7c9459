"""Complex numbers in ONNX: their parts in a last dimension of two, by our importer and by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.exporters.onnx.leaving import answers, assert_same, written

Z = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
ROW = torch.polar(torch.ones(4), torch.arange(4.0))
PLACES = torch.tensor([[0], [3], [1]])
CASES: dict[str, Callable[[torch.Tensor], object]] = {
    "products": lambda z: (z @ z.mT, torch.bmm(z[:, None], z[:, :, None]), z * ROW, z * 2, z * (1 + 2j), z * z.real),
    "quotients": lambda z: (z / (ROW + 2), z / 2, z / z.real, z.reciprocal()),
    "sums": lambda z: (z + 1, 1 - z, z + z.real, torch.add(z, z, alpha=2), z - 1j),
    "comparisons": lambda z: (z == z, z != z.conj()),
    "angles": lambda z: (z.angle(), z.log(), (z * 0.1).exp(), z.sqrt(), z**2),
    "waves": lambda z: (z.sin(), z.cos(), z.sinh(), z.cosh(), z.tanh()),
    "moved": lambda z: (z.flip(1), z.roll(1, 1), z[:, [0, 2]], z.gather(1, PLACES), z.repeat(2, 1), z.unbind(1)[1]),
    "chosen": lambda z: (torch.where(z.real > 0, z, z * 2), z.masked_fill(z.imag > 0, 0), torch.ones_like(z)),
    "written": lambda z: z.scatter(1, PLACES, z[:, 1:2]),
    "stacked": lambda z: (torch.stack([z, z], 1), F.pad(z, (1, 1)), z.cumsum(1)),
    "transforms": lambda z: (torch.fft.fftshift(torch.fft.fft(z)), torch.fft.ifft(z), torch.fft.fft2(z)),
}


@pytest.mark.parametrize("by", ["tessera", "ort"])
@pytest.mark.parametrize("name", CASES)
def test_what_a_form_computes(name: str, by: str) -> None:
    if by == "ort":
        pytest.importorskip("onnxruntime")

    def fn(x: torch.Tensor) -> object:
        return CASES[name](torch.view_as_complex(x))

    assert_same(answers(written(fn, (Z,), 20), (Z,), by), fn(Z))
