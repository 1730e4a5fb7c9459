"""A Python `if` on a tensor of which one side raises: on a mesh it is a check of the whole value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from all_ranks import assert_equal, train_mesh
from steps import compiled_step, pretended, program_of, train_whole
from torch import Tensor, nn

import tessera
from tessera.distributed import in_step
from tessera.frontends.functional.raising import with_checks
from tessera.frontends.functional.trace import trace_function
from tessera.ir.check import RAISE_IF
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.transforms.shard.partition import shard
from tessera.util.errors import CaptureError


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def gaussian(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mean, spread = model(x).chunk(2, -1)
    return F.gaussian_nll_loss(mean, y, spread.exp())  # asks whether a variance is negative


def asserted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    assert out.isfinite().all(), "not finite"
    if (out.abs().amax(-1) > 1e6).any():
        raise ValueError("too large")
    return F.mse_loss(out[:, :2], y)


@pytest.mark.parametrize("plan", [{"dp": "zero3"}, {"dp": "ddp", "tp": "tensor"}, {"pp": "1f1b"}], ids=str)
@pytest.mark.parametrize("loss", [gaussian, asserted])
def test_trains_alike(loss: Callable, plan: dict[str, str]) -> None:
    draw = torch.Generator().manual_seed(1)
    batches = [[torch.randn(4, n, dtype=torch.float64, generator=draw) for n in (6, 2)] for _ in range(2)]
    model = layers()
    mine = train_mesh(model, loss, batches, dict.fromkeys(plan, 2), plan)
    assert_equal(mine, train_whole(model, loss, batches, "adam", None))


def test_every_question_is_an_equation() -> None:
    batch = [torch.randn(4, n, dtype=torch.float64) for n in (6, 2)]
    _, compilation = compiled_step(layers(), asserted, batch, {"dp": 2}, "zero3", "sgd", None)
    asked = [eqn.args[1:] for eqn in program_of(compilation).equations if eqn.op is RAISE_IF]
    told = [(answer, message.split("\n")[0], kind) for answer, message, kind in asked]  # pytest adds to messages
    assert told == [(False, "not finite", "AssertionError"), (True, "too large", "ValueError")]
    assert not any("0x" in message for _, message, _ in asked)  # all ranks write the same


def test_all_ranks_raise_for_what_one_has() -> None:
    def positive(x: Tensor) -> Tensor:
        if (x < 0).any():
            raise ValueError("below zero")
        return x.sqrt()

    x, mesh = torch.tensor([1.0, 2.0, 3.0, -4.0]), Mesh.of(dp=2)
    trace = with_checks(lambda: trace_function(positive, (x,)).trace)
    place = Placement.parse("[4/dp]", mesh)
    program = shard(trace, mesh, {trace.inputs[0]: place}).trace
    (roots,) = in_step.run(program, [in_step.cut(x.abs(), place)])
    torch.testing.assert_close(in_step.join(roots, program.outputs[0].type.placement), x.abs().sqrt())
    with pytest.raises(ValueError, match="^below zero$"):
        in_step.run(program, [in_step.cut(x, place)])


def jitted(model: nn.Module) -> Callable:
    return tessera.jit(model, mesh=tessera.mesh(device="cpu", fake=True, dp=1), plan="ddp", executors="aten")


def test_a_call_raises_as_eager_does() -> None:
    class Positive(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not (x > 0).all():
                raise ValueError("expected what is positive")
            return super().forward(x)

    with pretended({"dp": 1}):
        model = Positive(2, 2)
        fast = jitted(model)
        assert fast(torch.ones(2, 2)).shape == (2, 2)
        with pytest.raises(ValueError, match="expected what is positive"):
            fast(-torch.ones(2, 2))


def test_both_sides_that_go_on_are_refused() -> None:
    class Choosing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    class Late(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                if (super().forward(x)).shape[0] == 2:  # it has computed something
                    raise ValueError("later")
                return x
            return x

    for kind in (Choosing, Late):
        with pretended({"dp": 1}), pytest.raises(CaptureError, match="asks for the value of a tensor"):
            jitted(kind(2, 2))(torch.ones(2, 2))
