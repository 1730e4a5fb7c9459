"""`tessera bench serve` measures; the limit is what the machine's figures give."""

from __future__ import annotations

import pytest

from tessera.machines import machine
from tessera.tools.bench.serve import table
from tessera.tools.bench.serve_limit import Model, seconds
from tessera.tools.bench.serve_offline import Place, measure, usual


def test_the_usual_lengths_and_their_limit() -> None:
    prompts, outs = usual(256)
    assert (sum(map(len, prompts)), sum(outs)) == (142_827, 133_966)
    model = Model(596_049_920, 2 * 596_049_920, 28 * 8 * 128 * 2 * 2)
    lengths = [(len(p), o) for p, o in zip(prompts, outs, strict=True)]
    assert sum(outs) / seconds(model, lengths, machine("h200")) == pytest.approx(33_400, rel=0.02)


def test_a_tiny_run() -> None:
    rows = list(measure(["one", "prefix", "fp8"], Place("cpu", True, options={"compiled": False})))
    assert [(r.job, r.unit) for r in rows] == [("one", "ms")] * 2 + [("prefix", "x")] * 2 + [("fp8", "tok/s")]
    assert all(r.value > 0 for r in rows) and table(rows).row_count == 5
