"""Programs whose sizes are open, written as ONNX and run at sizes that the example did not have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
import torch.nn.functional as F

import tessera
from tessera.exporters.onnx.decompose import _usual
from tessera.onnx import ExportError, export
from tessera.torch_internals.shapes import ShapeEnv
from tessera.util.errors import CaptureError, InputError
from tests.exporters.onnx.leaving import answers, assert_same

CASES: dict[str, Callable[[torch.Tensor], object]] = {
    "adaptive average": lambda x: (F.adaptive_avg_pool1d(x, 2), F.adaptive_avg_pool2d(x, (2, 3))),
    "adaptive maximum": lambda x: F.adaptive_max_pool1d(x, 3),
    "rolled": lambda x: (x.roll(1, 1), x.roll((-1, 2), (0, 1)), x.roll(3)),
    "running": lambda x: (x.cummax(1), x.cummin(0), x.logcumsumexp(1), x.cumprod(2)),
    "in the middle": lambda x: (x.median(), x.median(1), x.median(2, keepdim=True)),
    "Fourier": lambda x: (torch.fft.rfft(x).abs(), torch.fft.irfft(torch.fft.rfft(x, dim=1), n=x.shape[1], dim=1)),
    "Fourier, scaled": lambda x: torch.fft.rfft(x, dim=1, norm="ortho").abs(),
    "neighbours": lambda x: (torch.diff(x, dim=1), x[:, -(x.shape[1] // 2) :], x[:, 1::2]),
    "masked keys": lambda x: F.scaled_dot_product_attention(
        *[x.unsqueeze(1)] * 3, attn_mask=(x[:, :, 0] > -1).unsqueeze(1).unsqueeze(1)
    ),
    "doubled": lambda x: F.interpolate(x, scale_factor=2.0, mode="linear") + x.repeat(1, 1, 2),
    "half as much again": lambda x: F.interpolate(F.interpolate(x, scale_factor=1.5), scale_factor=2.0) + 1,
    "diagonals": lambda x: (
        x.diagonal(0, 1, 2),
        x.diagonal(-2),
        torch.einsum("bii->bi", x @ x.mT),
        (x[0] @ x[0].T).trace(),
    ),
    "diagonals written": lambda x: (x @ x.mT).diagonal_scatter(x[..., 0], dim1=1, dim2=2),
    "halved and back": lambda x: F.interpolate(F.avg_pool1d(x, 2), size=x.shape[2], mode="nearest"),
}
DYNAMIC = {"x": {0: "batch", 1: "rows", 2: "columns"}}


@pytest.mark.parametrize("by", ["tessera", "ort"])
@pytest.mark.parametrize("name", CASES)
def test_other_sizes(name: str, by: str) -> None:
    if by == "ort":
        pytest.importorskip("onnxruntime")

    def fn(x: torch.Tensor) -> object:
        return CASES[name](x)

    torch.manual_seed(0)
    model = export(fn, (torch.randn(4, 7, 6),), dynamic=DYNAMIC, check=False)
    assert model is not None
    for shape in ((4, 7, 6), (5, 8, 9), (3, 6, 4)):
        x = torch.randn(shape)
        assert_same(answers(model, (x,), by), fn(x))


def test_conditions_that_parts_of_an_operator_hold_on() -> None:
    size = sympy.Symbol("s0", integer=True, positive=True)
    env = ShapeEnv()
    assert _usual(sympy.Ne(size - 1, 1), env)  # PyTorch asks whether to broadcast
    assert not _usual(sympy.Ne(sympy.Mod(size, 2), 0), env)
    assert not _usual(size > 5, env)


def test_a_result_that_is_a_buffer_is_compared_as_it_was_given() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.n += 1
            return x + self.n, self.n

    model = Counter()
    assert export(model, (torch.randn(3),)) is not None
    assert model.n == 0


def test_narrow_inputs_meet_wide_weights() -> None:
    class Norms(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GroupNorm(2, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            linear, layer, group = self.inner
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return group(layer(linear(x))[..., None]).float()

    x = torch.randn(3, 8)
    model = export(Norms().eval(), (x,))
    assert model is not None


def test_a_program_without_kernels_in_the_runtime_is_checked_by_the_reference() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x + x).relu().sort(0)[0]

    assert export(fn, (torch.randn(3, 4).bfloat16(),)) is not None


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_artifacts_check_what_the_program_takes_for_granted(rows: int, tmp_path) -> None:
    """PyTorch believes that an open size is never 1, and would take the other branch there."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x[0] if x.shape[0] == 1 else torch.diff(x, dim=1)

    tessera.export(fn, (torch.randn(rows, 5),), tmp_path / "d.tess", dynamic={"x": {0: "rows", 1: "columns"}})
    run = tessera.load(tmp_path / "d.tess")
    for shape in ((2, 5), (4, 3), (7, 2), (3, 1)):
        x = torch.randn(shape)
        torch.testing.assert_close(run(x), fn(x))
    with pytest.raises(InputError, match="expected rows from 2 to any size, got 1"):
        run(torch.randn(1, 5))
    with pytest.raises(CaptureError):
        tessera.export(fn, (torch.randn(2, 5),), tmp_path / "e.tess", dynamic={"x": {0: ("rows", 1, 9)}})


def test_rounding_is_no_other_answer() -> None:
    """What cancels is rounding alone, of which no digit agrees with another runtime's."""

    class Mean(torch.nn.Module):
        def __init__(self, lost: float = 0.0) -> None:
            super().__init__()
            self.norm, self.lost = torch.nn.InstanceNorm2d(3), lost

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            if not torch.compiler.is_exporting():
                y = y + self.lost
            return y.mean((2, 3))

    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 7)
    export(Mean(), (x,))
    with pytest.raises(ExportError, match="gives another answer"):
        export(Mean(1e-3), (x,))
    export(lambda x: F.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="sum"), (x,))  # of functions, too
