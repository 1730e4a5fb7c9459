"""Each strategy alone, crossed with what a step may ask for: it trains as one process on the whole batch does."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from all_ranks import assert_equal, train_mesh
from models import GPT, Llama, MoE, token_batches, token_loss
from steps import OPTIMIZERS, pretended, train_whole
from strategies import ALONE, FEATURES, PIPELINES, model_for, plan_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.distributed.weights import local_of

MODELS = {"gpt": GPT, "llama": Llama, "moe": MoE}


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Tensor) -> Tensor:
        return checkpoint(self.block, *args, use_reentrant=False)


def autocast_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return token_loss(model, ids, labels)


@dataclass
class Case:
    model: nn.Module
    loss: object = token_loss
    optimizer: str = "adam"
    clip: float | None = None
    rows: tuple[int, ...] = (4, 4)  # of the batches: the second step begins with the state of the first
    options: dict = field(default_factory=dict)
    tolerance: float = 1e-11


def case_of(word: str, feature: str) -> Case:
    torch.manual_seed(0)
    case = Case(MODELS[model_for((word,))](2 if word in PIPELINES else 1).double())
    match feature:
        case "Adam":
            pass
        case "SGD":
            case.optimizer = "sgd"
        case "accumulate":
            case.options, case.rows = {"accumulate": 2}, (4, 4, 4, 4)
        case "clip_norm":
            case.clip = 0.5
        case "checkpoint":
            case.model.blocks = nn.ModuleList(map(Checkpointed, case.model.blocks))
        case "memory_budget":
            case.options = {"memory_budget": 2000}
        case "autocast":  # ranks round elsewhere; tables and norms stay in float32
            case.model, case.loss, case.optimizer, case.tolerance = case.model.float(), autocast_loss, "sgd", 5e-2
        case "frozen":
            for name, p in case.model.named_parameters():
                p.requires_grad_(not name.startswith("words") and "down" not in name and ".n1." not in name)
        case "batch size":
            case.rows = 8, 4, 8
        case _:
            raise AssertionError(feature)
    return case


def crossings() -> list:
    """One for every strategy always; every feature is among these."""
    return [
        pytest.param(word, feature, marks=[] if (i + j) % len(FEATURES) == 0 else [pytest.mark.sweep])
        for i, word in enumerate(ALONE) for j, feature in enumerate(FEATURES)
    ]  # fmt: skip


@pytest.mark.parametrize(("word", "feature"), crossings())
def test_crossed(word: str, feature: str) -> None:
    case, plan = case_of(word, feature), plan_of((word,))
    batches = [token_batches(i + 1, rows)[i] for i, rows in enumerate(case.rows)]
    common = case.model, case.loss, batches
    mine = train_mesh(*common, dict.fromkeys(plan, 2), plan, case.optimizer, case.clip, **case.options)
    want = train_whole(*common, case.optimizer, case.clip, case.options.get("accumulate", 1))
    assert_equal(mine, want, case.tolerance)


def test_the_first_step_of_sgd_takes_all_of_the_gradient() -> None:
    """However much dampening there is later."""
    torch.manual_seed(0)
    model, batches = GPT(1).double(), token_batches(3)
    with pytest.MonkeyPatch.context() as patch:
        damped = lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5)  # noqa: E731
        patch.setitem(OPTIMIZERS, "damped", damped)
        want = train_whole(model, token_loss, batches, "damped", None)
        with pretended({"dp": 1}) as mesh:
            step = tessera.train_step(
                model, token_loss, damped(model.parameters()), executors="aten", mesh=mesh, plan="zero3"
            )  # fmt: skip
            for batch in batches:
                step(*batch)
    for name, p in model.named_parameters():
        torch.testing.assert_close(local_of(p).detach(), want.held[name], rtol=1e-11, atol=1e-13)
