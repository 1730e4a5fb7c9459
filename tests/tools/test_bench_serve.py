"""`tessera bench serve` measures; the limit is what the machine's figures give."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tessera.machines import machine
from tessera.tools.bench import serve_table
from tessera.tools.bench.serve import figures, table
from tessera.tools.bench.serve_limit import Model, seconds
from tessera.tools.bench.serve_load import Result, arrivals, replayed
from tessera.tools.bench.serve_place import Measured, Place, usual
from tessera.tools.bench.serve_table import JOBS, compared, known, measured
from tessera.tools.cli import main
from tessera.util.errors import InputError


def test_the_usual_lengths_and_their_limit() -> None:
    prompts, outs = usual(Place("cuda"))
    assert (sum(map(len, prompts)), sum(outs)) == (142_827, 133_966)
    model = Model(596_049_920, 2 * 596_049_920, 28 * 8 * 128 * 2 * 2)
    lengths = [(len(p), o) for p, o in zip(prompts, outs, strict=True)]
    assert sum(outs) / seconds(model, lengths, machine("h200")) == pytest.approx(33_400, rel=0.02)


@pytest.mark.sweep
@pytest.mark.parametrize("name", set(JOBS) - {"artifact", "folder"})
def test_a_tiny_run(name: str) -> None:
    place = Place("cpu", True, options={"compiled": False})
    rows = measured([name], place, None, [])
    assert rows and all(row.job == name and row.value is not None for row in rows), rows
    assert table(rows).row_count == len(rows)


def test_a_job_that_fails_or_takes_too_long_leaves_a_row_and_the_others_stay(tmp_path: Path) -> None:
    kept = Measured("one", "first token", 1.0, "ms", 30.0, False)
    late = measured(["qwen"], Place("cpu", True), 0.05, [kept])
    assert late[0].job == "qwen" and late[0].value is None and late[0].note.startswith("stopped") and late[1] == kept
    failed = measured(["int4"], Place("nowhere", True), None, late)
    assert [row.job for row in failed] == ["qwen", "one", "int4"] and "nowhere" in failed[2].note
    assert failed[2].passed is False and table(failed).row_count == 3


def test_rows_are_kept_as_they_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is cut off loses none of what it has measured."""

    def own_process(name: str, place: Place, seconds: float | None) -> list[Measured]:
        if name == "one":
            raise KeyboardInterrupt
        return [Measured(name, "throughput", 7.0, "tok/s", note="of a test")]

    monkeypatch.setattr(serve_table, "own_process", own_process)
    path = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        main(["bench", "serve", "--table", "--tiny", "--only", "llama", "qwen", "one", "--json", str(path)])
    assert [row.job for row in known(path)] == ["qwen", "llama"]
    assert "qwen, throughput: 7 tok/s (of a test)" in capsys.readouterr().err


def test_figures_of_two_jobs_are_made_anew(tmp_path: Path) -> None:
    rates = {"qwen": 20_000.0, "huggingface": 5_000.0, "deterministic": 18_000.0}
    rows = [Measured(job, "throughput", rate, "tok/s") for job, rate in rates.items()]
    made = {(row.job, row.what): row.value for row in compared(rows)}
    assert made == {("qwen", "times huggingface"): 4.0, ("deterministic", "price"): pytest.approx(10.0)}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [asdict(row) for row in (*rows, *compared(rows))]}))
    assert known(path) == rows and known(tmp_path / "none") == []


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
