"""Arguments of an artifact that are no tensors, or lie otherwise than the example; results that are sizes; targets."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tessera
from tessera.tile.targets.cpu.levels import levels_here
from tessera.util.errors import InputError, OptionError

NUMBERS = [0.0, -0.0, math.nan, math.inf, -math.inf, 0.1, 0, False]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_a_number_is_the_one_it_was_exported_for(value: float, tmp_path: Path) -> None:
    def fn(x: Tensor, by: float) -> Tensor:
        return torch.atan2(x, x * 0 + by)

    x = torch.tensor([0.0, -0.0, 1.0])
    tessera.export(fn, (x, value), tmp_path / "m.tess")
    for way in ({}, {"compile": False}):
        run = tessera.load(tmp_path / "m.tess", **way)
        torch.testing.assert_close(
            run(x, float(repr(value)) if type(value) is float else value), fn(x, value), equal_nan=True
        )
        for other in NUMBERS:
            if repr(other) != repr(value):
                with pytest.raises(InputError, match="by: expected .*, which the program was exported for, got"):
                    run(x, other)


def test_results_that_are_sizes(tmp_path: Path) -> None:
    def fn(x: Tensor) -> tuple:
        return x.shape, x.shape[0] * 2, {"shape": x[:, :2].shape}

    tessera.export(fn, (torch.ones(4, 3),), tmp_path / "m.tess", dynamic={"x": {0: "n"}})
    run = tessera.load(tmp_path / "m.tess")
    assert run(torch.ones(7, 3)) == ((7, 3), 14, {"shape": (7, 2)})
    program = tessera.jit(tessera.to_exported(fn, (torch.ones(4, 3),), dynamic={"x": {0: "n"}}))
    assert program(torch.ones(7, 3)) == fn(torch.ones(7, 3))


@pytest.mark.parametrize("target", ["cuda:sm_9", "cuda:90", "cuda:sm_", "cuda:sm_90a", "cpu:z80", "tpu", ""])
def test_targets_that_are_none(target: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"targets: expected .*, got '{target}'"):
        tessera.export(torch.relu, (torch.ones(2),), tmp_path / "m.tess", targets=[target])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["nope", "cuda:99", "cpu:x"])
def test_devices_that_are_none(device: str, tmp_path: Path) -> None:
    tessera.export(torch.relu, (torch.ones(2),), tmp_path / "m.tess")
    with pytest.raises(OptionError, match=f"device: expected .*, got '?{device}"):
        tessera.load(tmp_path / "m.tess", device=device)


SHARING = {
    "expanded": torch.randn(1, 5).expand(6, 5), "windows": torch.randn(9).unfold(0, 4, 1),
    "columns": torch.randn(3, 1, 1).expand(3, 4, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARING)
def test_examples_that_show_elements_twice(name: str, tmp_path: Path) -> None:
    """Others that come need not; a program that was exported for such alone says so."""

    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.gelu(x * 2 + 1)

    net, example = Net(), SHARING[name]
    other = torch.randn(example.shape)
    tessera.export(net, (example,), tmp_path / "m.tess")
    for way in ({}, {"compile": False, "trust": False}):
        run = tessera.load(tmp_path / "m.tess", **way)
        for x in (example, other):
            torch.testing.assert_close(run(x), net(x))
    program = torch.export.export(net, (example,))
    tessera.export(program, path=tmp_path / "p.tess")
    for run in (tessera.load(tmp_path / "p.tess"), tessera.jit(program)):
        torch.testing.assert_close(run(example), net(example))
        with pytest.raises(InputError, match="which show elements twice"):
            run(other)


def test_floats_that_tensors_hold(tmp_path: Path) -> None:
    def fn(x: Tensor, n: Tensor) -> tuple:
        scale = n.item()
        return torch.full((3,), scale), x * scale, x + (scale * 2 + 1)

    tessera.export(fn, (torch.ones(2), torch.tensor(2.5)), tmp_path / "m.tess")
    for way in ({}, {"compile": False}):
        run = tessera.load(tmp_path / "m.tess", **way)
        for value in (2.5, -1.0, math.inf):
            args = torch.randn(2), torch.tensor(value)
            torch.testing.assert_close(run(*args), fn(*args))


def test_the_best_target_that_fits_runs(tmp_path: Path) -> None:
    levels = levels_here()
    if len(levels) < 2:
        pytest.skip("kernels of one kind alone run on this machine")
    targets = [f"cpu:{level}" for level in reversed(levels)]
    tessera.export(torch.nn.functional.gelu, (torch.ones(4),), tmp_path / "m.tess", targets=targets)
    assert tessera.load(tmp_path / "m.tess").main.way.target == f"cpu:{levels[0]}"


class Row(torch.nn.Module):
    """It writes a row of another buffer."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self.register_buffer("row", whole[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.row.add_(x) * 2


class Both(Row):
    def __init__(self, whole: Tensor) -> None:
        super().__init__(whole)
        self.register_buffer("whole", whole)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.whole * 1


class Whole(torch.nn.Module):
    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self.register_buffer("whole", whole)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole + x


def test_state_in_the_memory_of_another_tensor_is_refused(tmp_path: Path) -> None:
    whole, x, path = torch.zeros(2, 3), torch.ones(3), tmp_path / "m.tess"
    told = "writes row, which lies in the same memory as whole"
    with pytest.raises(OptionError, match=told):
        tessera.export(Both(whole), (x,), path)
    with pytest.raises(OptionError, match=told):
        tessera.export({"write": (Row(whole), (x,)), "read": (Whole(whole), (x,))}, path=path)
    tessera.export({"write": (Row(whole.clone()), (x,)), "read": (Whole(whole), (x,))}, path=path)
    tessera.export({"a": (Whole(whole), (x,)), "b": (Whole(whole[0]), (x,))}, path=path)  # nobody writes


def test_named_arguments_are_not_taken_by_position(tmp_path: Path) -> None:
    """The file knows their names, not where they stand in the function."""

    def fn(a: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Tensor:
        return (a if b is None else a - b) * (1 if c is None else c)

    a, b, c = torch.randn(3, 4)
    for given in ({"c": c}, {"c": c, "b": b}):
        tessera.export(fn, (a,), tmp_path / "m.tess", kwargs=given)
        run = tessera.load(tmp_path / "m.tess")
        torch.testing.assert_close(run(a, **given), fn(a, **given))
        torch.testing.assert_close(run(**given, a=a), fn(a, **given))
        with pytest.raises(InputError, match="expected a, c="):
            run(a, *given.values())
