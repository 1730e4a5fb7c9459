"""A draft model guesses: answers are those without it, in fewer steps where it is good; it is left where it is not."""

from __future__ import annotations

import copy
from random import Random

import pytest
import torch
import transformers
from families import BASE, expected, model, prompts_of, token_bytes

from tessera.serve.engine import Engine
from tessera.serve.lookup import TRIES
from tessera.util.errors import OptionError

MANY = 2**22  # bytes of cache


def noisy(name: str, scale: float) -> torch.nn.Module:
    """The model, nearly."""
    torch.manual_seed(0)
    draft = copy.deepcopy(model(name))
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * scale) if weight.ndim > 1 else None
    return draft


def other(**changed: object) -> torch.nn.Module:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**BASE, **changed})).eval()


def engine_of(name: str, draft: torch.nn.Module | None, **settings: object) -> Engine:
    given = {"memory": MANY, "block_size": 4, "compiled": False, "check": True, **settings}
    return Engine(model(name), draft=draft, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "gemma3", pytest.param("gpt2", marks=pytest.mark.sweep)])
def test_greedy_answers_are_those_of_generate(name: str) -> None:
    """Under little memory, which forces preemption, with shared beginnings; the draft is right now and then."""
    prompts = prompts_of(Random(name), 6)
    tight = 30 * 4 * 2 * token_bytes(name)  # the draft has pools too
    for settings in ({"budget": 16, "memory": tight}, {"speculate": 3, "reuse": False}):
        engine = engine_of(name, noisy(name, 0.4 if name == "gemma3" else 0.05), **settings)
        answers = engine.generate(prompts, max_tokens=12, temperature=0)
        assert [answer.tokens for answer in answers] == [expected(name, prompt) for prompt in prompts]
        facts = engine.metrics()
        assert 0 < facts.accepted < facts.drafted and facts.used_blocks == 0


def test_a_seed_gives_the_same_answer_with_and_without() -> None:
    asked = {"max_tokens": 20, "temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5, "seed": 3, "n": 2}
    prompt = [5, 9, 2, 11, 6]
    plain = engine_of("llama", None).generate([prompt], **asked)
    for draft in (noisy("llama", 0.05), other()):
        assert engine_of("llama", draft).generate([prompt], **asked) == plain


def test_the_model_as_its_own_draft_is_always_right() -> None:
    """Drawn by the same numbers, guesses are right at any temperature: a step gives five tokens."""
    for temperature in (0.0, 1.0):
        engine = engine_of("llama", model("llama"))
        engine.generate([[1, 2, 3]], max_tokens=21, temperature=temperature, seed=2)
        facts = engine.metrics()
        assert facts.accepted == facts.drafted == 16 and facts.steps == 5


def test_a_draft_that_does_not_pay_is_left() -> None:
    engine = engine_of("llama", other(hidden_size=32, intermediate_size=32, num_attention_heads=1))
    calls, drafter = [], engine._speculation.drafter
    assert drafter is not None
    run = drafter.programs.run
    drafter.programs.run = lambda *given: calls.append(1) or run(*given)  # type: ignore[method-assign]
    engine.generate([[1, 2, 3]], max_tokens=50, temperature=1.0, seed=2)
    assert TRIES <= engine.metrics().drafted < TRIES + 4 and engine.metrics().steps > 30
    assert len(calls) <= TRIES + 2  # and computes nothing any more


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": 65}, "draft: expected the model's vocabulary, 64, got 65"),
        ({"max_position_embeddings": 32}, "draft: it has 32 positions"),
    ],
)
def test_drafts_that_do_not_fit_are_refused(changed: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        engine_of("llama", other(**changed))
    with pytest.raises(OptionError, match="windows of attention"):
        engine_of("llama", model("gemma3"))
    with pytest.raises(OptionError, match="device and dtype"):
        engine_of("llama", other().to(torch.bfloat16))
