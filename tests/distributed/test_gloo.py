"""The front door over gloo with two processes: training on a mesh is training in one process on the whole batch."""

from __future__ import annotations

from pathlib import Path

import torch
from models import token_batches, token_loss
from ranks import launch, model_of, optimizer_of

CASES = [
    ({"dp": 2}, "zero3"),
    ({"dp": 1, "tp": 2}, {"dp": "zero3", "tp": "sequence"}),
    ({"tp": 2}, {"tp": "tensor", "places.weight": "n, d/tp"}),
]


def eager() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = model_of(0)
    optimizer, losses = optimizer_of(model), []
    for batch in token_batches(2):
        loss = token_loss(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def test_two_processes(tmp_path: Path) -> None:
    launch(2, str(tmp_path), CASES)
    losses, weights = eager()
    for number in range(len(CASES)):
        mine, parts = torch.load(tmp_path / f"{number}.pt")
        torch.testing.assert_close(mine, losses, rtol=1e-11, atol=0)
        for name, want in weights.items():
            torch.testing.assert_close(parts[name], want, rtol=1e-10, atol=1e-12)
