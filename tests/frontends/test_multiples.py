"""Sizes that are multiples of a number: `2*rows`, of which no argument has `rows` alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tessera
from tessera.util.errors import InputError, OptionError

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "windows": lambda x: x.view(-1, 2, x.shape[1] // 2) + 1,
    "transposed": lambda x: x.unflatten(1, (-1, 2)).transpose(1, 2).reshape(x.shape[0], -1),
    "taken apart": lambda x: F.pixel_unshuffle(x[None, None], 2),
    "pooled": lambda x: F.avg_pool1d(x, 2),
}
DYNAMIC = {"x": {0: "2*rows", 1: ("2 * columns", 4, 98)}}
SHAPES = ((4, 6), (6, 10), (8, 14))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_multiples(name: str, tmp_path: Path) -> None:
    def fn(x: Tensor) -> Tensor:
        return FUNCTIONS[name](x)

    program = tessera.to_exported(fn, (torch.randn(4, 6),), dynamic=DYNAMIC)
    tessera.export(program, path=tmp_path / "m.tess")
    runs = [tessera.jit(program), tessera.load(tmp_path / "m.tess"), tessera.load(tmp_path / "m.tess", compile=False)]
    for shape in SHAPES:
        x = torch.randn(shape)
        for run in runs:
            torch.testing.assert_close(run(x), fn(x))
    for run in runs:
        with pytest.raises(InputError, match=r"dimension 1: expected 2 \* columns with columns from 2 to 49, got 7"):
            run(torch.randn(4, 7))
        with pytest.raises(InputError, match="got 100"):
            run(torch.randn(4, 100))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_multiples_leave_as_onnx(name: str) -> None:
    pytest.importorskip("onnx")

    def fn(x: Tensor) -> Tensor:
        return FUNCTIONS[name](x)

    for model in (fn, tessera.to_exported(fn, (torch.randn(4, 6),), dynamic=DYNAMIC)):
        given = () if model is not fn else (torch.randn(4, 6),)
        written = tessera.onnx.export(model, given, dynamic=DYNAMIC if given else None)
        assert [d.dim_param.replace(" ", "") for d in written.graph.input[0].type.tensor_type.shape.dim] == [
            "2*rows", "2*columns",
        ]  # fmt: skip
        run = tessera.onnx.load(written)
        for shape in SHAPES:
            x = torch.randn(shape)
            torch.testing.assert_close(run(x), fn(x))


def test_a_multiple_and_its_root(tmp_path: Path) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x.view(y.shape[0], 3) * y[:, None]

    dynamic = {"x": {0: "3*n"}, "y": {0: "n"}}
    tessera.export(fn, (torch.randn(6), torch.randn(2)), tmp_path / "m.tess", dynamic=dynamic)
    run, x, y = tessera.load(tmp_path / "m.tess"), torch.randn(15), torch.randn(5)
    torch.testing.assert_close(run(x, y), fn(x, y))
    with pytest.raises(InputError, match=r"expected 15, which is 3 \* n, got 14"):
        run(x[:14], y)


def test_no_multiple() -> None:
    with pytest.raises(OptionError, match="expected a name, or a number times one, got '2\\*\\*rows'"):
        tessera.to_exported(torch.relu, (torch.randn(4),), dynamic={"arg0": {0: "2**rows"}})
    with pytest.raises(OptionError, match="expected the least and the most of rows, got 9 and 2"):
        tessera.to_exported(torch.relu, (torch.randn(4),), dynamic={"arg0": {0: ("rows", 9, 2)}})
    for dim in (1, -2, "0"):
        with pytest.raises(OptionError, match=f"arg0 has 1 dimensions, got {dim!r}"):
            tessera.to_exported(torch.relu, (torch.randn(4),), dynamic={"arg0": {dim: "rows"}})


def test_functions_of_pytorchs_own(tmp_path: Path) -> None:
    """They do not tell what their arguments are called."""
    x, y, dynamic = torch.randn(4, 3), torch.randn(3, 5), {"arg0": {-2: "rows"}}
    tessera.export(torch.matmul, (x, y), tmp_path / "m.tess", dynamic=dynamic)
    torch.testing.assert_close(tessera.load(tmp_path / "m.tess")(x[:2], y), x[:2] @ y)
    program = tessera.to_exported(torch.matmul, (x, y), dynamic=dynamic)
    torch.testing.assert_close(tessera.jit(program)(x[:2], y), x[:2] @ y)
    assert tessera.onnx.export(torch.matmul, (x, y), dynamic=dynamic).graph.input[0].name == "arg0"
