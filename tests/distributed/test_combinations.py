"""Strategies side by side train as one process on the whole batch does, in float64 to 1e-11 over two steps:
the second begins with the state of the first."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from all_ranks import assert_equal, train_mesh
from models import GPT, EncoderDecoder, Llama, MoE, token_batches, token_loss
from steps import train_whole
from strategies import MORE, PAGE, PAIRS, PIPELINES, model_for, page, plan_of
from torch import Tensor

STEPS = 2
MODELS = {"gpt": GPT, "llama": Llama, "moe": MoE, "encoder-decoder": EncoderDecoder}


@cache
def whole(name: str, layers: int) -> tuple:
    torch.manual_seed(0)
    model, batches = MODELS[name](layers).double(), token_batches(STEPS, 8)
    return model, batches, train_whole(model, token_loss, batches, "adam", None)


def layers_for(words: tuple[str, ...]) -> int:
    """Stages need one each; compiling more than that shows nothing new."""
    return 2 if any(word in PIPELINES for word in words) else 1


def check(words: tuple[str, ...]) -> None:
    plan = plan_of(words)
    model, batches, want = whole(model_for(words), layers_for(words))
    assert_equal(train_mesh(model, token_loss, batches, dict.fromkeys(plan, 2), plan), want)


@pytest.mark.parametrize("words", PAIRS, ids="·".join)
def test_two_together(words: tuple[str, ...]) -> None:
    check(words)


@pytest.mark.parametrize("words", MORE, ids="·".join)
def test_more_together(words: tuple[str, ...]) -> None:
    check(words)


@pytest.mark.parametrize(
    "words",
    [("zero3", "sequence"), ("zero3", "ring"), ("ulysses",), ("tensor", "1f1b"), ("interleaved",)],
    ids="·".join,
)
def test_an_encoder_and_a_decoder(words: tuple[str, ...]) -> None:
    """Layers of the decoder read what the encoder made, whatever their stage; keys are fewer than queries."""
    plan = plan_of(words)
    model, batches, want = whole("encoder-decoder", 2)
    assert_equal(train_mesh(model, token_loss, batches, dict.fromkeys(plan, 2), plan), want)


class Dropping(GPT):
    """Its activations are dropped at random."""

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.words(ids), 0.2)
        for block in self.blocks:
            x = F.dropout(block(x), 0.2)
        return self.head(self.norm(x))


@pytest.mark.parametrize("words", [("zero3", "sequence"), ("ring",)], ids="·".join)
def test_dropout_does_not_depend_on_the_mesh(words: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, batches, trained = Dropping(1).double(), token_batches(2, 4), []
    for plan, ranks in ((plan_of(words), 2), ({"dp": "ddp"}, 1)):
        torch.manual_seed(1)
        trained.append(train_mesh(model, token_loss, batches, dict.fromkeys(plan, ranks), plan))
    assert_equal(*trained)


@pytest.mark.parametrize("words", [("hsdp", "sequence"), ("zero3", "experts", "zero-bubble")], ids="·".join)
def test_in_float32(words: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, batches, plan = MODELS[model_for(words)](layers_for(words)), token_batches(2, 8), plan_of(words)
    mine = train_mesh(model, token_loss, batches, dict.fromkeys(plan, 2), plan)
    assert_equal(mine, train_whole(model, token_loss, batches, "adam", None), 1e-5, 1e-7)


def test_the_table_of_strategies_is_what_is_tested() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run python tests/distributed/strategies.py"
