"""The zoo: who is in it, who is held back, what a later run takes over, ratios and bars, one model end to end."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tessera.tools import cli
from tessera.tools.bench.model_contestants import EAGER, INDUCTOR, OURS, TUNED, Run, enter
from tessera.tools.bench.zoo import cell, results, run, suite
from tessera.tools.bench.zoo.child import in_children
from tessera.tools.bench.zoo.network import INFER, TRAIN, make
from tessera.tools.bench.zoo.registry import HELD, HELD_BACK, ZOO, entries, held_back
from tessera.tools.bench.zoo.report import BARS, geometric_mean, missed, rows, summary, table
from tessera.tools.bench.zoo.results import ERROR, LATE, OK, WRONG, Cell, Results
from tessera.tools.bench.zoo.run import Options

HERE = {"device": "a GPU", "torch": "2"}
SMALL = "actor-critic"


# --- the models ---


def test_the_zoo_is_large_and_named_once() -> None:
    names = [entry.name for entry in entries(tiny=False)]
    assert len(ZOO) >= 30 and len(names) == len(set(names)) > len(ZOO)
    assert len({network.family for network in ZOO.values()}) >= 15
    assert sum(network.small for network in ZOO.values()) >= 4
    for network in ZOO.values():
        assert network.full.keys() == network.tiny.keys() and network.full != network.tiny, network.name
    assert set(suite.SECTIONS) >= {"llama", "llama-infer", "diffusion-transformer"}


def test_ten_are_held_back_by_a_hash_of_their_names() -> None:
    assert len(HELD) == HELD_BACK == 10 and set(ZOO) > HELD
    names = [f"model {i}" for i in range(40)]
    assert held_back(names) == held_back(names[::-1]) < set(names)
    assert "model 0" not in held_back(names) and "model 13" in held_back(names)  # on every machine
    assert {e.network.name for e in entries(tiny=True, held=True)} == HELD


def test_a_definition_changes_with_what_is_computed() -> None:
    network = ZOO[SMALL]
    told = network.definition(TRAIN, tiny=True)
    assert told == network.definition(TRAIN, tiny=True)
    wider = replace(network, tiny={**network.tiny, "width": 9})
    others = {wider.definition(TRAIN, True), network.definition(TRAIN, False), network.definition(INFER, True)}
    assert told not in others and len(others) == 3


@pytest.mark.parametrize("name", ["lenet", "table-mlp", "realnvp"])
def test_a_network_is_drawn_the_same_each_time(name: str) -> None:
    network = ZOO[name]
    one, other = (make(network, TRAIN, True, "cpu", torch.bfloat16) for _ in range(2))
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q) and p.any()
    kinds = {m.weight.dtype for m in one.model.modules() if isinstance(m, torch.nn.BatchNorm1d)}
    assert kinds <= {torch.float32} and bool(kinds) == (name == "table-mlp")
    loss = one.model(*one.inputs)
    assert loss.shape == () and loss.isfinite()
    if network.infer:
        out = make(network, INFER, True, "cpu", torch.float32)
        assert out.model(*out.inputs).ndim > 1 and len(out.inputs) < len(one.inputs)


# --- what a later run takes over ---


def options(**more: object) -> Options:
    return Options((SMALL,), device="cpu", tiny=True, **more)  # type: ignore[arg-type]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The contestants that were measured; nothing is."""
    seen: list[str] = []

    def child(order: dict) -> dict:
        seen.append(order["who"])
        failed = {"status": ERROR, "why": "out of memory"}
        return failed if order["who"] == INDUCTOR else {"status": OK, "seconds": 1.0}

    monkeypatch.setattr(run, "in_children", lambda orders, limit: [child(order) for order in orders])
    monkeypatch.setattr(run, "here", lambda device: dict(HERE))
    return seen


def again(seen: list[str], path: Path, **more: object) -> list[str]:
    seen.clear()
    found = Results.of_file(path)
    assert run.run(options(**more), found, lambda text: None) == []
    assert {cell.who for cell in found.shown.values()} == {EAGER, INDUCTOR, OURS}
    return list(seen)


def test_a_later_run_goes_on_from_the_file(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "zoo.json"
    assert again(measured, path) == [EAGER, INDUCTOR, OURS]
    assert [one["who"] for one in json.loads(path.read_text())["cells"]] == [EAGER, INDUCTOR, OURS]
    assert again(measured, path) == [OURS]  # it is Tessera that changes
    assert again(measured, path, resume_ours=True) == []
    assert again(measured, path, resume_ours=True, retry=True) == [INDUCTOR]  # it had failed
    monkeypatch.setattr(run, "here", lambda device: {**HERE, "torch": "3"})
    assert again(measured, path, resume_ours=True) == [EAGER, INDUCTOR, OURS]
    monkeypatch.setitem(ZOO, SMALL, replace(ZOO[SMALL], tiny={**ZOO[SMALL].tiny, "width": 9}))
    assert again(measured, path, resume_ours=True) == [EAGER, INDUCTOR, OURS]


def test_side_by_side_stand_those_of_one_contestant(measured: list[str], tmp_path: Path) -> None:
    found = Results(path=tmp_path / "zoo.json")
    given = Options((SMALL, "lenet"), device="cpu", tiny=True, jobs=2)
    assert run.run(given, found, lambda text: None) == []
    assert measured == [who for who in (EAGER, INDUCTOR, OURS) for _ in given.entries()]
    assert {cell.beside for cell in found.shown.values()} == {1, 2}  # three jobs: two, then one


def test_after_the_deadline_nothing_is_begun(measured: list[str], tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    again(measured, path)
    before = path.read_text()
    measured.clear()
    found = Results.of_file(path)
    assert run.run(options(deadline=0.0), found, lambda text: None) == [f"{SMALL} {OURS}"]
    assert measured == [] and path.read_text() == before
    assert [cell.who for cell in found.shown.values()] == [EAGER, INDUCTOR]  # an old figure of ours is not shown


def test_a_file_of_another_suite_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "models.json"
    path.write_text('{"suite": "models", "rows": []}')
    assert cli.main(["bench", "zoo", "--tiny", "--device", "cpu", "--json", str(path)]) == 2
    assert "expected a file that the zoo wrote" in capsys.readouterr().err


def test_the_state_of_the_code_is_known() -> None:
    assert results.code() == results.code() and len(results.code()) == 16
    assert results.here("cpu")["torch"] == torch.__version__


# --- a measurement in a process of its own ---


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> str:
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("PYTHONPATH", path)
    return "zoo_child"


def test_what_a_child_gives_and_how_it_ends(children: str, tmp_path: Path) -> None:
    (found,) = in_children([{"do": "figures"}], 60, children)
    assert found["status"] == OK and not Path(found["cache"]).exists()  # a cache of its own, gone with it
    (crashed,) = in_children([{"do": "crash"}], 60, children)
    assert (crashed["status"], crashed["why"]) == (ERROR, "ended with code 3: about to go") and crashed["wall"] >= 0
    pid = tmp_path / "pid"
    assert in_children([{"do": "hang", "pid": str(pid)}], 5, children)[0]["status"] == LATE
    if pid.exists():  # what it started is gone too
        assert gone(int(pid.read_text()))


def test_side_by_side_they_compile_and_one_by_one_they_are_timed(children: str) -> None:
    first, crashed, second = in_children([{"do": "wait"}, {"do": "crash"}, {"do": "wait"}], 60, children)
    assert first["compiled"] < second["timed"][0] and second["compiled"] < first["timed"][0]
    assert first["timed"][1] <= second["timed"][0] and crashed["status"] == ERROR


def test_a_neighbour_that_takes_too_long_costs_nobody_else(children: str, tmp_path: Path) -> None:
    hangs, ready = in_children([{"do": "hang", "pid": str(tmp_path / "pid")}, {"do": "wait"}], 8, children)
    assert (hangs["status"], ready["status"]) == (LATE, OK)
    assert ready["wall"] < hangs["wall"]


def gone(pid: int) -> bool:
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_what_is_wrong_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lying(who: str, *given: object) -> Run:
        honest = enter(EAGER, *given)  # type: ignore[arg-type]
        return Run(honest.call, lambda out: {n: x * 1.01 for n, x in honest.results(out).items()})

    monkeypatch.setattr(cell, "enter", lying)
    monkeypatch.setattr(cell, "compile_something", lambda *given: None)
    found = cell.measure(SMALL, OURS, True, "cpu", 1, 0, lambda: None)
    assert found["status"] == WRONG and "is off by" in str(found["why"]) and "seconds" not in found
    assert found["error"] == pytest.approx(0.01, rel=0.1) and found["eager_error"] < 1e-4  # type: ignore[operator]

    def broken(who: str, *given: object) -> Run:
        raise RuntimeError("no such kernel\nmore")

    monkeypatch.setattr(cell, "enter", broken)
    assert cell.measure(SMALL, OURS, True, "cpu", 1, 0, lambda: None) == {
        "status": ERROR,
        "why": "RuntimeError: no such kernel",
    }


@pytest.mark.sweep  # three processes
def test_one_model_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    given = ["--tiny", "--device", "cpu", "--only", SMALL, "--who", EAGER, OURS, "--rounds", "2", "--json", str(path)]
    assert cli.main(["bench", "zoo", *given, "--check"]) == 0
    told = json.loads(path.read_text())
    eager, ours = told["cells"]
    assert (eager["status"], ours["status"]) == (OK, OK) and eager["floor"] > 0
    assert min(ours[name] for name in ("seconds", "first", "host")) > 0 and len(ours["samples"]) == 2
    assert max(ours[name] for name in ("error", "gradient_error")) < 1e-4 and ours["peak"] is None
    assert told["summary"]["missed"] == [] and set(told["summary"]["ratios"][SMALL].values()) == {None}


# --- ratios, means and bars ---


def cells(name: str, **figures: tuple[float, float]) -> list[Cell]:
    """TorchInductor's figures and ours."""
    made = []
    for i, who in enumerate((INDUCTOR, OURS)):
        own = {figure: pair[i] for figure, pair in figures.items()}
        made.append(Cell(name, "1", "cuda", who, "", HERE, OK, **own))  # type: ignore[arg-type]
    return made


def test_ratios_are_to_the_best_way_of_torchinductor() -> None:
    chosen = entries(tiny=False, only=("gpt2", "llama"))
    found = rows(
        chosen,
        [
            *cells("gpt2", seconds=(2.0, 1.0), peak=(4, 2), first=(10.0, 2.0)),
            *cells("llama", seconds=(1.0, 0.5)),
            Cell("llama", "1", "cuda", "inductor[tuned]", "", HERE, OK, seconds=0.25, first=99.0),
            Cell("llama-infer", "1", "cuda", INDUCTOR, "", HERE, ERROR, "out of [memory]"),
            Cell("llama-infer", "1", "cuda", OURS, "", HERE, OK, seconds=1.0),
            *cells("elsewhere", seconds=(1.0, 9.0)),
        ],
    )
    by_name = {row.job: row for row in found}
    assert by_name.keys() == {"gpt2", "llama", "llama-infer"}
    assert by_name["gpt2"].ratio("seconds") == 0.5 and by_name["gpt2"].held and by_name["gpt2"].ratio("host") is None
    assert by_name["llama"].ratio("seconds") == 2.0 and not by_name["llama"].held
    assert by_name["llama-infer"].ratio("seconds") is None
    told = summary(found, missed(found))
    assert told["means"]["seconds"] == pytest.approx(1.0) and told["held_back_means"]["seconds"] == 0.5  # type: ignore[index]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(found))
    shown = console.export_text()
    assert all(text in shown for text in ("gpt2 *", "0.50", "llama-infer, inductor: error, out of [memory]"))


def test_bars() -> None:
    chosen = entries(tiny=False, only=("gpt2", "lenet", "lenet-infer"))
    good = [*cells("gpt2", seconds=(1.0, 0.8), peak=(4, 2), first=(10.0, 2.0)), *cells("lenet", host=(1.0, 0.7))]
    assert missed(rows(chosen, good)) == []
    bad = cells("gpt2", seconds=(1.0, 1.01), peak=(4, 5), first=(10.0, 4.0)) + cells("lenet", host=(1.0, 0.9))
    assert missed(rows(chosen, bad)) == [
        "gpt2: time 1.01 of TorchInductor's, at most 1",
        "time in the mean of all 1.01, at most 0.88",
        "time in the mean of those held back 1.01, at most 0.88",
        "gpt2: memory 1.25 of TorchInductor's, at most 1",
        "memory in the mean of all 1.25, at most 0.75",
        "first call in the mean of all 0.40, at most 0.35",
        "lenet: host time 0.90 of TorchInductor's, at most 0.8",
    ]
    assert missed(rows(chosen, bad), ()) == []
    wrong = replace(good[1], status=WRONG, why="loss is off")
    assert missed(rows(chosen, [good[0], wrong]), ()) == ["gpt2: wrong, loss is off"]
    assert {bar.figure for bar in BARS} == {"seconds", "peak", "first", "host"}


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, None, 2.0]) == pytest.approx(1.0) and geometric_mean([None]) is None


# --- the command line ---


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--device", "cpu"], "--tiny"),
        (["--tiny", "--device", "cpu", "--who", "aot_eager"], "for the zoo, got 'aot_eager'"),
        (["--only", "softmax"], "choose from llama"),
    ],
)
def test_command_line_refuses(given: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "zoo", *given]) == 2
    assert text in capsys.readouterr().err


def test_more_ways_of_torchinductor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Options] = []

    def nothing(options: Options, *given: object) -> list[str]:
        asked.append(options)
        return ["llama inductor[tuned]"]

    monkeypatch.setattr(suite, "run", nothing)
    given = ["--best", "--tiny", "--device", "cpu", "--held-back", "--deadline", "5", "--limit", "7"]
    assert cli.main(["bench", "zoo", *given]) == 0
    assert asked[0].who == (EAGER, INDUCTOR, *TUNED, OURS) and asked[0].held
    assert (asked[0].deadline, asked[0].limit, asked[0].rounds) == (5.0, 7.0, 7)
    assert "no time was left for 1: llama inductor[tuned]" in capsys.readouterr().out
