"""The benchmark of training in 8 bits: contestants, what they learn from, and what the table says."""

from __future__ import annotations

import io

import torch
from rich.console import Console

from tessera.tools.bench import fp8


def test_contestants_are_steps_of_their_own() -> None:
    torch.manual_seed(0)
    model = fp8.Llama(fp8.TINY.llama).to(torch.bfloat16)
    made = fp8.contestants(model, fp8.TINY, quick=False)
    assert {fp8.EAGER, fp8.BF16, fp8.EIGHT, f"{fp8.EIGHT} delayed", f"{fp8.EIGHT} row"} <= set(made)
    assert set(fp8.contestants(model, fp8.TINY, quick=True)) == {fp8.BF16, fp8.EIGHT}
    tokens = torch.randint(fp8.TINY.llama.vocab, fp8.TINY.tokens)
    before = [p.clone() for p in model.parameters()]
    losses = [float(made[who]()(tokens, tokens)) for who in (fp8.EAGER, fp8.EIGHT)]
    assert abs(losses[0] - losses[1]) < 0.02 * losses[0]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_language_is_always_the_same() -> None:
    config = fp8.TINY.gpt
    one, two = (fp8.language(config, 3, "cpu") for _ in range(2))
    first = next(one)
    assert first.shape == (3, config.context + 1) and torch.equal(first, next(two))
    assert not torch.equal(first, next(one))


def test_losses_are_held_against_16_bits(monkeypatch, capsys) -> None:
    curves = iter([[2.0] * 100, [2.01] * 100, [2.0] * 50 + [1.9] * 50, [2.0] * 100, [1.99] * 100])
    monkeypatch.setattr(fp8, "losses", lambda *_, **__: next(curves))
    rows = list(fp8.learning(fp8.TINY, "cpu", False, lambda _: None))
    assert [row["passed"] for row in rows] == [None, True, False, True, None]
    assert "2.0000 (+0.00%) 1.9000 (-5.00%)" in capsys.readouterr().err
    step = {"section": "step", "who": fp8.EIGHT, "ms": 20.0, "ratio": 0.7, "at_most": 0.75, "passed": True}
    failed = {"section": "step", "who": fp8.TORCHAO, "error": "RuntimeError: no", "passed": None}
    console = Console(file=io.StringIO(), width=160)
    console.print(fp8.table([step, failed, *rows]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "50.00" in text and "0.70 x tessera bf16" in text and "5.00%" in text and "RuntimeError: no" in text
