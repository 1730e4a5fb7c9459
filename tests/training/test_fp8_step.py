"""A training step in 8 bits: it learns as one in 16 bits does, as one program, with its scales carried along."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tessera
from tessera.just_in_time.compiled import compiled_state
from tessera.util.errors import OptionError

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.read = nn.Linear(width, width)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3)))
        self.say = nn.Linear(width, width)

    def forward(self, x):
        return self.say(self.blocks(self.read(x)))


def loss_of(model, x, y):
    return F.mse_loss(model(x).float(), y.float())


def trained(precision, steps: int = 12, accumulate: int = 1, model: nn.Module | None = None, **options):
    """The losses of some steps, and the step."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = model or Net().to(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = tessera.train_step(
        model, loss_of, optimizer, precision=precision, strict=True, accumulate=accumulate, **options
    )
    losses = []
    target = torch.randn(32, 32)
    for _ in range(steps):
        x = torch.randn(32, 32)
        losses.append(float(step(x.to(BF16), (x @ target).to(BF16))))
    return losses, step


def recipe(**options) -> tessera.FP8:
    return tessera.FP8(smallest=16, **options)


def near(losses, wanted, rtol: float = 0.02):
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=rtol, atol=0)


@pytest.mark.parametrize("executors", [["aten"], ["tile", "aten"]], ids=["aten", "tile"])
@pytest.mark.parametrize("options", [{}, {"scaling": "row"}, {"history": "delayed"}], ids=["tensor", "row", "delayed"])
def test_it_learns_as_16_bits_do(options, executors):
    losses, step = trained(recipe(**options), executors=executors)
    wanted, _ = trained(None, executors=executors)
    near(losses, wanted)
    assert not step.in_parts
    (compilation,) = compiled_state(step).compilations()
    assert compilation.account.fp8.multiplied == ("blocks.0.0", "blocks.1.0", "blocks.2.0")
    assert dict(compilation.account.fp8.left) == {"read": "first layer", "say": "last layer"}


def test_weights_are_rounded_once_a_step():
    _, step = trained(recipe(), steps=1, executors=["aten"])
    (compilation,) = compiled_state(step).compilations()
    trace = dict(compilation.account.stages)["step"]
    kinds = [e.out.dtype for e in trace.equations if e.opname == "_to_copy" and e.out.dtype.itemsize == 1]
    assert (
        kinds.count(torch.float8_e4m3fn) == 3 + 3 and kinds.count(torch.float8_e5m2) == 3
    )  # inputs, weights, gradients


@pytest.mark.parametrize("history", ["current", "delayed"])
def test_accumulation(history):
    losses, step = trained(recipe(history=history), steps=8, accumulate=2, executors=["aten"])
    wanted, _ = trained(None, steps=8, accumulate=2, executors=["aten"])
    near(losses, wanted)
    assert len(step.state_dict()) == (3 if history == "delayed" else 0)


def test_in_parts_it_is_the_same():
    model = Net().to(BF16)
    other = copy.deepcopy(model)
    losses, _ = trained(recipe(history="delayed"), model=model, executors=["aten"])
    model = other
    hook = model.read.weight.register_hook(lambda grad: grad)
    found, step = trained(recipe(history="delayed"), model=model, executors=["aten"])
    hook.remove()
    assert step.in_parts and len(step.state_dict()) == 3
    near(found, losses, rtol=1e-2)


def test_histories_are_state():
    _, step = trained(recipe(history="delayed", length=4), steps=3, executors=["aten"])
    state = step.state_dict()
    assert set(state) == {"blocks.0.0", "blocks.1.0", "blocks.2.0"}
    for history in state.values():
        assert history.shape == (4, 3) and (history[:3] > 0).all() and (history[3] == 0).all()
    _, other = trained(recipe(history="delayed", length=4), steps=0)
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), state.values(), strict=True))
    other(torch.randn(32, 32, dtype=BF16), torch.randn(32, 32, dtype=BF16))
    torch.testing.assert_close(other.state_dict()["blocks.1.0"][1:], state["blocks.1.0"][:3])
    with pytest.raises(OptionError, match=r"expected a history of \(4, 3\), got \(2, 3\)"):
        other.load_state_dict({"blocks.0.0": torch.zeros(2, 3)})
    _, plain = trained(recipe(), steps=0)
    with pytest.raises(OptionError, match="no delayed scales"):
        plain.load_state_dict(state)


def test_unknown_precision():
    with pytest.raises(OptionError, match="precision: expected None, 'fp8' or tessera.FP8"):
        trained("fp4", steps=0)
