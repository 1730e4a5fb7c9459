"""The benchmark of depth: its models run, and ratios are those of many blocks to few."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from tessera.tools.bench import depth


@pytest.mark.parametrize("name", depth.MODELS)
def test_a_model_has_as_many_blocks_as_are_asked_for(name: str) -> None:
    few, many = (depth.MODELS[name](blocks) for blocks in (4, 8))
    model, inputs = few
    assert model(*inputs).shape == torch.Size([])
    assert len(model.blocks) == 4 and len(many[0].blocks) == 8


def test_cold_comes_before_warm_in_one_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[str] = []

    def in_process(module: str, task: str, environment: dict[str, str], **asked: object) -> float:
        caches.append(environment["TESSERA_CACHE"])
        cold = caches.count(caches[-1]) == 1
        return (4.0 if cold else 1.0) * (2 if asked["depth"] == 64 else 1)

    monkeypatch.setattr(depth, "in_process", in_process)
    outcome = depth.outcome(Namespace(only=["gpt"], who=None, rounds=2), lambda text: None)
    shown = [(row["section"], row["who"], row["value"], row["passed"]) for row in outcome.rows]
    assert shown == [
        ("gpt, cold", "8 blocks", 4000.0, None),
        ("gpt, cold", "64 blocks", 8000.0, False),
        ("gpt, warm", "8 blocks", 1000.0, None),
        ("gpt, warm", "64 blocks", 2000.0, False),
    ]
    assert outcome.missed and len(set(caches)) == 4
