"""Pipelines train as one process on the whole batch does, alone and beside other axes, in float64 to 1e-11; and as
accumulation in one process does, bit for bit."""

from __future__ import annotations

from functools import cache
from pipes import Ranks, pipelined_step

import pytest
import torch
from models import GPT, Llama, token_batches, token_loss
from steps import Trained, train_whole

from tessera.transforms.pipelined.known import WORDS

STEPS = 5
MODELS = {"gpt": GPT, "llama": Llama}


@cache
def model_of(name: str) -> tuple:
    torch.manual_seed(0)
    return MODELS[name](2).double(), token_loss, token_batches(STEPS, 8)


@cache
def whole(name: str, optimizer: str, clip: float | None) -> Trained:
    return train_whole(*model_of(name), optimizer, clip)


def check(
    name: str, axes: dict, plan: object, optimizer: str = "adam", clip: float | None = None, **options: object
) -> None:
    model, loss, batches = model_of(name)
    step, compilation = pipelined_step(model, loss, batches[0], axes, plan, optimizer, clip, **options)
    mine, want = Ranks(model, step, compilation).trained(batches), whole(name, optimizer, clip)
    assert mine.held.keys() == want.held.keys()
    pairs = [*zip(mine.losses, want.losses, strict=True), *((mine.held[n], x) for n, x in want.held.items())]
    for got, x in pairs:
        assert (got - x).norm() <= 1e-11 * x.norm() + 1e-14


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("model", MODELS)
def test_alone(model: str, word: str) -> None:
    check(model, {"pp": 2}, word)


DATA = ("zero1", "zero2", "zero3")
PAIRS = [({"dp": 2, "pp": 2}, {"dp": data, "pp": word}) for data in DATA for word in WORDS[1:4]]
PAIRS += [({"rep": 2, "dp": 2, "pp": 2}, {"rep": "hsdp", "dp": "zero3", "pp": word}) for word in WORDS[1:4]]
PAIRS += [({"tp": 2, "pp": 2}, {"tp": "sequence", "pp": word}) for word in ("1f1b", "zero-bubble")]
PAIRS += [({"dp": 2, "tp": 2, "pp": 2}, {"dp": "zero3", "tp": "sequence", "pp": "1f1b"})]


@pytest.mark.parametrize(("axes", "plan"), PAIRS, ids=lambda x: "-".join(map(str, x.values())))
def test_beside_other_axes(axes: dict, plan: dict) -> None:
    check("gpt", axes, plan)


def test_clipped_with_sgd() -> None:
    """The norm is that of the gradients of all stages."""
    check("gpt", {"dp": 2, "pp": 2}, {"dp": "zero1", "pp": "1f1b"}, "sgd", clip=0.5)


@pytest.mark.parametrize("options", [{"recompute": "none"}, {"recompute": "cheap"}, {"memory_budget": 2000}], ids=str)
def test_what_backward_recomputes(options: dict) -> None:
    check("llama", {"dp": 2, "pp": 2}, {"dp": "zero3", "pp": "zero-bubble"}, **options)
