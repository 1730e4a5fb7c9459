"""Strategies side by side train as one process on the whole batch does, in float64 to 1e-11 over five steps."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from all_ranks import assert_equal, train_mesh
from models import GPT, Llama, MoE, token_batches, token_loss
from steps import train_whole
from strategies import MORE, PAGE, PAIRS, model_for, page, plan_of

STEPS = 5
MODELS = {"gpt": GPT, "llama": Llama, "moe": MoE}


@cache
def whole(name: str, rows: int) -> tuple:
    torch.manual_seed(0)
    model, batches = MODELS[name]().double(), token_batches(STEPS, rows)
    return model, batches, train_whole(model, token_loss, batches, "adam", None)


@pytest.mark.parametrize("words", [*PAIRS, *MORE], ids="·".join)
def test_together(words: tuple[str, ...]) -> None:
    plan = plan_of(words)
    model, batches, want = whole(model_for(words), 8)
    assert_equal(train_mesh(model, token_loss, batches, dict.fromkeys(plan, 2), plan), want)


def test_the_table_of_strategies_is_what_is_tested() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run python tests/distributed/strategies.py"
