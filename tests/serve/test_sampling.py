"""Tokens are chosen as straightforward code for one row, and transformers' own, would choose them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tessera.serve import sampling_aten
from tessera.serve.sampling import Draw, Rows, Sampling, adjust, choose, logprobs, rows_of
from tessera.serve.sampling_aten import barred, cut, scaled
from tessera.util.errors import OptionError

VOCABULARY = 24


def logits_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def draw(settings: Sampling, output: tuple[int, ...] = (), **fields: object) -> Draw:
    return Draw(settings, 7, 0, (1, 2, 3), output, **fields)  # type: ignore[arg-type]


def rows(draws: Sequence[Draw], first: int = 0) -> Rows:
    """Of rows at neighbouring positions."""
    return rows_of(draws, range(first, first + len(draws)))


SETTINGS = [
    Sampling(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product((0.5, 1.0, 1.7), (0, 1, 5), (1.0, 0.6), (0.0, 0.1))
]


def by_transformers(row: Tensor, settings: Sampling) -> Tensor:
    """Probabilities of one row's tokens as transformers' warpers leave them."""
    row = TemperatureLogitsWarper(settings.temperature)(None, row[None])
    if settings.top_k:
        row = TopKLogitsWarper(settings.top_k)(None, row)
    if settings.top_p < 1:
        row = TopPLogitsWarper(settings.top_p)(None, row)
    if settings.min_p:
        row = MinPLogitsWarper(settings.min_p)(None, row)
    return row.softmax(-1)[0]


def test_settings_leave_what_transformers_leaves() -> None:
    """All settings side by side in one batch, each row its own."""
    logits = logits_of(len(SETTINGS))
    asked = rows([draw(s) for s in SETTINGS])
    ours = scaled(cut(logits, asked.temperature, asked.cuts), asked.temperature).softmax(-1)
    theirs = torch.stack([by_transformers(row, s) for row, s in zip(logits, SETTINGS, strict=True)])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [*SETTINGS[::2], *SETTINGS[1::9]], ids=str)
def test_draws_follow_the_probabilities(settings: Sampling) -> None:
    """Chi-squared over 2000 positions. The numbers are Philox: always the same, so nothing here is luck."""
    row, count = logits_of(1)[0], 2000
    tokens = choose(row.expand(count, -1), rows([draw(settings)] * count))
    expected = by_transformers(row, settings).double() * count
    seen = torch.bincount(tokens, minlength=VOCABULARY).double()
    likely = expected >= 5
    assert not seen[expected == 0].any()
    error = ((seen - expected)[likely].square() / expected[likely]).sum()
    freedom = max(1, int(likely.sum()) - 1)
    assert error < freedom + 4 * (2 * freedom) ** 0.5 + 4


def test_few_of_the_likeliest_say_what_all_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where many are equally likely or barred. Rows of which the few say it are not sorted whole."""
    generator, sorted_whole, told = torch.Generator().manual_seed(0), 0, 0
    for trial in range(60):
        logits = torch.randn(8, 100, generator=generator) * (1 + trial % 6)
        if trial % 3 == 0:
            logits = logits.round()
        if trial % 4 == 0:
            logits[:, 5:].masked_fill_(torch.rand(8, 95, generator=generator) < 0.8, float("-inf"))
        top_k, top_p, min_p, temperature = torch.rand(4, 8, generator=generator)
        cuts = (top_k * 40 - 20).clamp(min=0).long(), (2 * top_p).clamp(min=1e-3, max=1.0), (min_p - 0.7).clamp(min=0)
        asked = Rows(temperature=temperature + 0.1, cuts=cuts)
        monkeypatch.setattr(sampling_aten, "FEW", 100)
        whole = cut(logits, asked.temperature, asked.cuts)
        monkeypatch.setattr(sampling_aten, "FEW", 16)
        assert torch.equal(cut(logits, asked.temperature, asked.cuts), whole)
        certain = barred(logits, 16, asked.temperature, *cuts)[1]
        told, sorted_whole = told + int(certain.sum()), sorted_whole + int((~certain).sum())
    assert min(told, sorted_whole) > 100


@pytest.mark.parametrize("equals", [2, 4, 8])
def test_equal_tokens_have_exactly_equal_shares(equals: int) -> None:
    """With top_p at a border between them, rounding must not let one more in."""
    for temperature in (0.3, 0.7, 1.0, 1.3, 3.3):
        for top in (90.0, 3.14159, -2.5):
            logits = torch.full((1, 60), -1e4)
            logits[0, 10 : 10 + equals] = top
            for kept in range(1, equals):
                asked = rows_of([Draw(Sampling(temperature=temperature, top_p=kept / equals))], [0])
                assert (cut(logits, asked.temperature, asked.cuts) > float("-inf")).sum() == kept


def test_temperature_0_takes_the_likeliest() -> None:
    logits = logits_of(5)
    assert torch.equal(choose(logits, rows([draw(Sampling(temperature=0))] * 5)), logits.argmax(-1))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits, wanted = logits_of(6), Sampling(temperature=1.3, top_p=0.9)
    alone = [choose(logits[i : i + 1], rows([draw(wanted)], 40 + i)).item() for i in range(6)]
    others = [draw(Sampling(temperature=0.2, top_k=2)), draw(Sampling(temperature=0))]
    together = choose(torch.cat([logits, logits_of(2, 5)]), rows([draw(wanted)] * 6 + others, 40))
    assert together[:6].tolist() == alone


def test_seeds_answers_and_positions_draw_other_numbers() -> None:
    flat, settings = torch.zeros(1, 1000), Sampling()
    variants = [(7, 0, 0), (8, 0, 0), (7, 1, 0), (7, 0, 1), (-7, 0, 0), (2**70 + 7, 3, 0)]
    tokens = {choose(flat, rows([Draw(settings, s, a)], p)).item() for s, a, p in variants}
    assert len(tokens) == len(variants)


def penalised(row: Tensor, d: Draw) -> Tensor:
    """The plain code for one row."""
    s, row = d.settings, row.clone()
    seen = torch.tensor([[*d.prompt, *d.output]])
    row = RepetitionPenaltyLogitsProcessor(s.repetition_penalty)(seen, row[None])[0]
    for token in set(d.output):
        row[token] -= s.presence_penalty + s.frequency_penalty * d.output.count(token)  # type: ignore[attr-defined]
    for token, bias in s.logit_bias.items():
        row[token] += bias
    for token in range(VOCABULARY):
        if token in d.banned or (s.allowed is not None and token not in s.allowed):
            row[token] = float("-inf")
    return row


def test_bias_penalties_and_allowed_tokens() -> None:
    draws = [
        draw(Sampling(repetition_penalty=1.7), output=(5, 5, 9)),
        draw(Sampling(presence_penalty=0.5, frequency_penalty=-0.3), output=(5, 5, 9)),
        draw(Sampling(logit_bias={4: 2.5, 9: -100.0})),
        draw(Sampling(allowed=(3, 8))),
        draw(Sampling(), banned=(0, 2)),
        draw(Sampling(repetition_penalty=0.8, frequency_penalty=1.0, logit_bias={5: 1.0}), output=(5, 6)),
        draw(Sampling()),
    ]
    logits = logits_of(len(draws))
    expected = torch.stack([penalised(row, d) for row, d in zip(logits, draws, strict=True)])
    torch.testing.assert_close(adjust(logits, rows(draws)), expected)


def test_logits_that_are_no_numbers_give_no_token() -> None:
    logits = logits_of(3)
    logits[1, 4] = float("nan")
    for temperature in (0.0, 1.0):
        tokens = choose(logits, rows([draw(Sampling(temperature=temperature))] * 3))
        assert (tokens >= 0).tolist() == [True, False, True]


def test_log_probabilities() -> None:
    logits = logits_of(4)
    tokens = torch.tensor([3, 0, 11, 23])
    values, top, which = logprobs(logits, tokens, 2)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(values, expected[range(4), tokens])
    torch.testing.assert_close((top, which), tuple(expected.topk(2)))


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("max_tokens", 0), ("repetition_penalty", 0), ("n", 0),
     ("stop", ("",)), ("allowed", ()), ("min_tokens", 99), ("presence_penalty", 3)],
)  # fmt: skip
def test_settings_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(OptionError, match=field):
        Sampling(**{field: value})  # type: ignore[arg-type]
