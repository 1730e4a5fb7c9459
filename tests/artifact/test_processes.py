"""Processes that load one file at once give one answer and share the memory of its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import measure

import tessera

SMAPS = Path("/proc/self/smaps")
COUNT, WIDTH = 2, 1536


@pytest.mark.skipif(not SMAPS.exists() or "Pss:" not in SMAPS.read_text(), reason="/proc says nothing of shared memory")
@pytest.mark.parametrize("beside", [None, pytest.param("weights.safetensors", marks=pytest.mark.sweep)])
def test_processes_share_weights(tmp_path: Path, beside: str | None) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(WIDTH, WIDTH).eval(), torch.ones(4, WIDTH)
    path = tmp_path / "m.tess"
    tessera.export(model, (x,), path, weights=beside)
    got = measure(path, [tmp_path / beside if beside else path], COUNT)
    size = WIDTH * WIDTH * 4 / 1024
    with torch.no_grad():
        expected = model(x).double().sum().item()
    assert got.answers == pytest.approx([expected] * COUNT, rel=1e-4, abs=1e-2)
    assert min(got.rss) > 0.9 * size  # every process has them in memory,
    assert sum(got.pss) < 1.2 * size  # and there they are once
