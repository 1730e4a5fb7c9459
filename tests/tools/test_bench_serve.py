"""`tessera bench serve` measures; the limit is what the machine's figures give."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.machines import machine
from tessera.tools.bench.serve import figures, table
from tessera.tools.bench.serve_limit import Model, seconds
from tessera.tools.bench.serve_load import Result, arrivals, replayed
from tessera.tools.bench.serve_offline import Place, measure, usual
from tessera.util.errors import InputError


def test_the_usual_lengths_and_their_limit() -> None:
    prompts, outs = usual(Place("cuda"))
    assert (sum(map(len, prompts)), sum(outs)) == (142_827, 133_966)
    model = Model(596_049_920, 2 * 596_049_920, 28 * 8 * 128 * 2 * 2)
    lengths = [(len(p), o) for p, o in zip(prompts, outs, strict=True)]
    assert sum(outs) / seconds(model, lengths, machine("h200")) == pytest.approx(33_400, rel=0.02)


@pytest.mark.sweep
def test_a_tiny_run() -> None:
    rows = list(measure(["one", "prefix", "fp8", "huggingface"], Place("cpu", True, options={"compiled": False})))
    assert [(r.job, r.unit) for r in rows] == [("one", "ms")] * 2 + [("prefix", "x")] * 2 + [
        ("fp8", "tok/s"), ("huggingface", "tok/s"),
    ]  # fmt: skip
    assert all(r.value > 0 for r in rows) and table(rows).row_count == 6


def test_arrivals(tmp_path: Path) -> None:
    made = arrivals(2000, 50.0, (100, 20), shared=7, spread=0.5)
    assert made[-1].at == pytest.approx(40, rel=0.15) and len({tuple(a.prompt[:7]) for a in made}) == 1
    assert {len(a.prompt) - 7 for a in made} <= set(range(50, 151)) and len({a.out for a in made}) > 10
    bursts = arrivals(2000, 50.0, (3, 2), bursty=True)
    assert len({a.at for a in bursts}) == 250 and bursts[-1].at == pytest.approx(40, rel=0.3)
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 0.5, "prompt_tokens": 3, "output_tokens": 4}\n')
    assert [(a.at, len(a.prompt), a.out) for a in replayed(path)] == [(0.5, 3, 4)]
    path.write_text('{"at": 0.5}\n')
    with pytest.raises(InputError, match="trace.jsonl:1"):
        replayed(path)


def test_goodput_counts_what_came_in_time() -> None:
    results = [Result(200, 0.1, [0.01] * 3, 1.0, 4), Result(200, 0.9, [0.01], 1.0, 2), Result(429)]
    rows = {row.what: row.value for row in figures(results, 2.0, 0.2, 0.03)}
    assert (rows["goodput"], rows["requests"], rows["throughput"]) == (0.5, 1.0, 3.0)
