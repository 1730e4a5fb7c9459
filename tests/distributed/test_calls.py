"""Calls of jitted models on a mesh of one rank: results, buffers and gradients are eager's, whatever their form."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from models import Pictures, picture_batches
from steps import pretended

import tessera
from tessera.util.errors import InputError, OptionError


def test_running_statistics_and_gradients() -> None:
    torch.manual_seed(0)
    model = Pictures().double()
    plain, x = copy.deepcopy(model), picture_batches(1)[0][0]
    with pretended({"dp": 1}) as mesh:
        fast = tessera.jit(model, mesh=mesh, plan="zero3", executors="aten")
        for _ in range(2):
            for f in (fast, plain):
                f(x).square().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.to_local(), q.grad)
        for a, b in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(a, b)
        model.eval(), plain.eval()
        with torch.no_grad():
            torch.testing.assert_close(fast(x), plain(x))


@pytest.mark.parametrize(("axis", "plan"), [("dp", "zero3"), ("tp", "tensor"), ("pp", "1f1b")])
def test_copies_lie_as_the_model_does(axis: str, plan: str) -> None:
    """A teacher, a reference, an average: copied before the first call, and after."""
    layer = torch.nn.Linear(4, 4)
    model, x = torch.nn.Sequential(layer, torch.nn.Tanh(), torch.nn.Linear(4, 4)), torch.randn(4, 4)
    plain = copy.deepcopy(model)
    with pretended({axis: 1}) as mesh:
        early = copy.deepcopy(tessera.shard(model, mesh, plan))
        torch.testing.assert_close(tessera.jit(model, executors="aten")(x), plain(x))
        late, average = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        step = tessera.train_step(
            model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=1.0), executors="aten"
        )
        step(x)
        for copied in (early, late, average.module):
            torch.testing.assert_close(tessera.jit(copied, executors="aten")(x), plain(x))


class Chance(torch.nn.Module):
    """It has as many columns as the batch has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple:
        y = self.layer(x)
        return y, y.amax(0), y.T, self.layer.weight * 2, y[:, :2]


def test_what_is_as_long_as_the_batch_by_chance_is_whole() -> None:
    x = torch.randn(4, 8)
    shapes = [(4, 8), (8,), (8, 8), (8, 8), (4, 2)]
    with pretended({"dp": 2}) as mesh:
        assert [y.shape for y in tessera.jit(Chance(), mesh=mesh, plan="zero3", executors="aten")(x)] == shapes
        model = Chance()
        by = torch.optim.SGD(model.parameters())
        step = tessera.train_step(
            model, lambda m, x: (m(x)[0].sum(), *m(x)), by, mesh=mesh, plan="ddp", executors="aten"
        )
        assert [y.shape for y in step(x)[1:]] == shapes
    with pretended({"pp": 1}) as mesh, pytest.raises(OptionError, match="as long by chance"):
        tessera.jit(Chance(), mesh=mesh, plan="1f1b", microbatches=2, executors="aten")(torch.randn(16, 8))


class Many(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict:
        y = self.layer(x) * scale
        return {"rows": y, "given": x, "pair": (y, y), "number": 3, "nothing": None, "mean": y.mean()}


def test_results_of_any_form() -> None:
    torch.manual_seed(0)
    model, x = Many(), torch.randn(2, 4, requires_grad=True)
    plain, other = copy.deepcopy(model), x.detach().clone().requires_grad_()
    with pretended({"dp": 1}) as mesh:
        out, want = (
            tessera.jit(tessera.shard(model, mesh, "ddp"), executors="aten")(x, scale=2.0),
            plain(other, scale=2.0),
        )
        assert out["number"] == 3 and out["nothing"] is None and out["pair"][0] is out["pair"][1]
        for r in (out, want):
            (r["mean"] + r["rows"].sum()).backward()
        for name in ("rows", "given", "mean"):
            torch.testing.assert_close(out[name], want[name])
        torch.testing.assert_close(x.grad, other.grad)
        torch.testing.assert_close(model.layer.weight.grad.to_local(), plain.layer.weight.grad)


def test_frozen_weights_have_no_gradient() -> None:
    with pretended({"dp": 1}) as mesh:
        model = Many()
        model.layer.bias.requires_grad_(False)
        tessera.shard(model, mesh, "zero3")
        tessera.jit(model, executors="aten")(torch.randn(2, 4))["mean"].backward()
        assert model.layer.bias.grad is None and model.layer.weight.grad is not None


@dataclass
class Batch:
    rows: torch.Tensor
    scale: float = 1.0


@dataclass
class Known(Batch):
    pass


torch.utils._pytree.register_dataclass(Known)


class Whole:
    def __init__(self, power: float) -> None:
        self.power = power


class Reading(torch.nn.Linear):
    def forward(self, batch: object, how: object = None) -> torch.Tensor:
        rows = torch.as_tensor(getattr(batch, "rows", batch))
        return super().forward(rows) * getattr(batch, "scale", 1.0) * getattr(how, "power", 1.0)


def test_objects_as_arguments() -> None:
    model, how = Reading(4, 4).double(), Whole(1.0)
    plain = copy.deepcopy(model)
    x, y = torch.randn(2, 2, 4, dtype=torch.float64)
    with pretended({"dp": 1}) as mesh:
        fast = tessera.jit(model, mesh=mesh, plan="ddp", executors="aten")
        for batch, power in ((Known(x), 1.0), (Known(y), 1.0), (Known(y, 2.0), 1.0), (y, 3.0), (y, 1.0)):
            how.power = power
            torch.testing.assert_close(fast(batch, how), plain(batch, how))
        assert len(tessera.explain(fast).graphs) == 4
        for batch, says in ((Batch(x), "Batch.rows: expected tensors as arguments"), (np.ones((2, 4)), "as_tensor")):
            with pytest.raises(InputError, match=rf"test_calls.py:\d+: .*{says}"):
                fast(batch)
