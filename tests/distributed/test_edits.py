"""Programs of ranks that a person edited: what runs is what the file says, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pipe_steps import Ranks, pipelined_step
from steps import compiled_step, train_ranks, train_whole
from torch import nn

import tessera
from tessera.util.errors import EditError

PLANS = {
    "zero3": ({"dp": 2}, "zero3"),
    "1f1b": ({"pp": 2}, {"pp": "1f1b"}),
    "both": ({"dp": 2, "pp": 2}, {"dp": "zero3", "pp": "1f1b"}),
}


def net(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 8), nn.Linear(8, 4)).double()


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


BATCHES = [[torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i))] for i in range(2)]


def saved(step: object, stage: str, path: Path) -> str:
    tessera.stages(step)[stage].save(str(path))
    return path.read_text()


def compiled(name: str) -> tuple:
    axes, plan = PLANS[name]
    if "pp" in axes:
        return pipelined_step(net(nn.ReLU()), loss_fn, BATCHES[0], axes, plan, "sgd", microbatches=2)
    return compiled_step(net(nn.ReLU()), loss_fn, BATCHES[0], axes, plan, "sgd", None)


def trained(name: str, step: object, compilation: object, batches: list):  # noqa: ANN201
    model = net(nn.ReLU())
    if "pp" in PLANS[name][0]:
        return Ranks(model, step, compilation).trained(batches)
    return train_ranks(model, step, compilation, batches)


@pytest.mark.parametrize("name", PLANS)
def test_a_captured_program_that_was_edited_is_differentiated_and_partitioned(name: str, tmp_path: Path) -> None:
    step, compilation = compiled(name)
    path = tmp_path / "captured.py"
    text = saved(step, "captured", path)
    assert text.count("aten.relu(") == 1
    path.write_text(text.replace("aten.relu(", "aten.sigmoid("))
    tessera.edit(step, str(path))
    got, want = trained(name, step, compilation, BATCHES), train_whole(net(nn.Sigmoid()), loss_fn, BATCHES, "sgd", None)
    for a, b in zip(got.losses, want.losses, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=0)
    for key, x in want.held.items():
        torch.testing.assert_close(got.held[key], x, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("halves", [("forward",), ("forward", "backward"), ("backward", "forward")], ids=" ".join)
@pytest.mark.parametrize("name", PLANS)
def test_a_forward_that_was_edited(name: str, halves: tuple[str, ...], tmp_path: Path) -> None:
    """Its loss is what the file says; weights that forward and update both name are one input of the step."""
    step, compilation = compiled(name)
    for half in halves:
        path = tmp_path / f"{half}.py"
        text = saved(step, half, path)
        path.write_text(text.replace("aten.relu(", "aten.sigmoid("))
        tessera.edit(step, str(path))
    got = trained(name, step, compilation, BATCHES[:1])
    want = train_whole(net(nn.Sigmoid()), loss_fn, BATCHES[:1], "sgd", None)
    torch.testing.assert_close(got.losses[0], want.losses[0], rtol=1e-11, atol=0)
    assert not torch.equal(got.held["0.weight"], net(nn.ReLU())[0].weight)


@pytest.mark.parametrize("name", PLANS)
def test_a_backward_that_was_edited(name: str, tmp_path: Path) -> None:
    """Without a gradient nothing is updated; the loss stays."""
    step, compilation = compiled(name)
    path = tmp_path / "backward.py"
    text = saved(step, "backward", path)
    seed = "aten.full([], 0.5" if "pp" in PLANS[name][0] else "aten.full([], 1.0"
    assert seed in text
    path.write_text(text.replace(seed, "aten.full([], 0.0"))
    tessera.edit(step, str(path))
    got, want = (
        trained(name, step, compilation, BATCHES[:1]),
        train_whole(net(nn.ReLU()), loss_fn, BATCHES[:1], "sgd", None),
    )
    torch.testing.assert_close(got.losses[0], want.losses[0], rtol=1e-11, atol=0)
    for key, x in net(nn.ReLU()).named_parameters():
        assert torch.equal(got.held[key], x)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("aten.relu(", "aten.relux(", "expected an operator of PyTorch"),
        ("aten.relu(", "aten.sum(", "expected"),  # another shape
        ("def ", "def not_", "expected a function"),
        ("return ", "return ( ", "expected Python"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, before: str, after: str, says: str, tmp_path: Path) -> None:
    step, compilation = compiled(name)
    program, path = compilation.executable, tmp_path / "captured.py"
    text = saved(step, "captured", path)
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(EditError, match=says):
        tessera.edit(step, str(path))
    assert compilation.executable is program
