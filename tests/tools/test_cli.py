"""The command line, what it measures with, and the model it measures on."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints, entry_points

import pytest
import torch
from rich.console import Console

from tessera.tools import cli, doctor
from tessera.tools.bench import core, probe
from tessera.tools.bench.measure import in_fresh_process, interleave, ratio
from tessera.tools.bench.report import Target, listed, rows, table, to_json
from tessera.tools.machine import machine
from tessera.tools.models import GPT, GPTConfig

SMALL = GPTConfig(layers=2, width=32, heads=2, context=8, vocab=16)


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == "tessera 0.1.0\n"


def test_a_command_is_required(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 2
    assert "command" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["unknown"], ["bench", "unknown"], ["bench", "core", "--who", "nobody"]])
def test_unknown_names_are_refused_with_the_known_ones(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "choose from" in capsys.readouterr().err


def test_every_command_is_reachable():
    help_text = " ".join(cli.parser().format_help().split())  # however wide the terminal is
    for name, (text, _) in cli.COMMANDS.items():
        assert f"{name} {text}" in help_text
        cli.parser(name)


def test_what_serves_does_not_wait_for_the_compiler():
    """A model that was compiled before is there as soon as PyTorch is, and so is the list of commands."""
    program = """
import sys
from tessera.tools import cli
cli.parser().format_help()
for name in ("generate", "serve", "top"):
    cli.command(name)
    print(name, {"torch._dynamo", "xdsl", "triton", "transformers", "tessera.pipeline"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["generate set()", "serve set()", "top set()", ""]


def test_console_script_and_backend_are_registered():
    scripts = {point.name: point.value for point in entry_points(group="console_scripts")}
    backends = {point.name: point.value for point in entry_points(group="torch_dynamo_backends")}
    assert scripts["tessera"] == "tessera.tools.cli:main"
    assert backends["tessera"] == "tessera.api:backend"


def test_doctor_passes_on_a_whole_installation(capsys):
    assert cli.main(["doctor"]) == 0
    assert torch.__version__ in capsys.readouterr().out


def test_doctor_fails_on_an_old_torch(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "OLDEST_TORCH", (99, 0))
    assert cli.main(["doctor"]) == 1
    assert "expected 99.0 or newer" in " ".join(capsys.readouterr().out.split())


def test_doctor_names_a_backend_that_does_not_load(monkeypatch):
    broken = EntryPoint("tessera", "tessera.tools.models:missing", "torch_dynamo_backends")
    monkeypatch.setattr(doctor, "entry_points", lambda **_: EntryPoints([broken]))
    check = doctor._backend()
    assert check.ok is False and "missing" in check.found


def test_interleave_samples_everyone_equally():
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    samples = interleave(calls, rounds=3, repeat=2)
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 3, "b": 3}
    assert "".join(order) == "ab" + "aabb" + "bbaa" + "aabb"


def test_ratio_is_taken_within_rounds():
    # The machine was ten times slower in the second round: the medians mislead, the rounds do not.
    samples = {"a": [2.0, 20.0, 2.0], "b": [1.0, 10.0, 1.0]}
    assert ratio(samples, "a", "b") == 2.0


def test_targets_decide_rows():
    samples = {"peer": [1e-3, 1e-3], "ours": [1.1e-3, 1.3e-3], "alone": [20e-3, 20e-3]}
    targets = {"ours": Target(1.2, "peer"), "alone": Target(15.0)}
    peer, ours, alone = rows("section", "ms", samples, "peer", targets)
    assert (peer.ratio, peer.passed) == (None, None)
    assert ours.ratio == pytest.approx(1.2) and ours.value == pytest.approx(1.2)
    assert rows("section", "ms", samples, "peer", {"ours": Target(1.1, "peer")})[1].passed is False
    assert rows("section", "ms", samples, "peer", {"ours": Target(1.3, "peer")})[1].passed is True
    assert (alone.value, alone.ratio, alone.passed) == (20.0, None, False)


def test_a_target_without_its_peer_falls_away():
    (row,) = rows("section", "ms", {"ours": [1.0]}, "eager", {"ours": Target(1.2, "peer")})
    assert (row.peer, row.ratio, row.at_most, row.passed) == (None, None, None, None)


def test_report_is_json_and_table():
    found = rows("section", "µs", {"peer": [1e-6], "ours": [2e-6]}, "peer", {"ours": Target(3.0, "peer")})
    report = json.loads(json.dumps(to_json("core", machine(), listed(found))))
    assert report["machine"]["torch"] == torch.__version__
    assert [(row["who"], row["passed"]) for row in report["rows"]] == [("peer", None), ("ours", True)]
    assert report["rows"][1]["value"] == pytest.approx(2.0)
    assert table(found, "title").row_count == 2


def test_table_shows_names_in_brackets_as_they_are():
    samples = {"peer[x]": [1e-6], "ours[y]": [2e-6]}
    found = rows("section", "µs", samples, "peer[x]", {"ours[y]": Target(3.0, "peer[x]")})
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(found, "title"))
    shown = console.export_text()
    assert "ours[y]" in shown and "2.00 x peer[x]" in shown and "pass" in shown


def test_extra_contestants_join_whoever_was_chosen():
    assert core.Options(extra=("inductor",)).choose("eager", "dynamo") == ["eager", "dynamo", "inductor"]
    chosen = core.Options(who=frozenset({"eager"}), extra=("inductor",))
    assert chosen.choose("eager", "dynamo") == ["eager", "inductor"]


def test_contestants_do_not_share_a_code_object():
    first, second = probe.fresh(probe._add), probe.fresh(probe._add)
    assert first.__code__ is not second.__code__
    assert first(1, 2) == 3


def test_failing_probe_says_what_and_why():
    with pytest.raises(RuntimeError, match=r"compile_cost.*(?s:.*)KeyError: 'nobody'"):
        in_fresh_process(probe.__name__, "compile_cost", who="nobody", layers=1, backward=False)


def test_compile_cost_is_measured_in_a_fresh_process():
    options = {"who": "dynamo", "layers": 1, "backward": True}
    assert in_fresh_process(probe.__name__, "compile_cost", **options) > 0


@pytest.mark.sweep  # it compiles and times everything
def test_bench_measures_and_writes_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(core, "BLOCKS", 1)
    path = tmp_path / "core.json"
    who = ["--who", "eager", "aot_eager"]
    only = ["--only", "call-train", "step"]
    assert cli.main(["bench", "core", *only, *who, "--rounds", "1", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["rows"]
    assert [(row["section"], row["who"]) for row in found] == [
        ("a + b, per call with backward", "eager"),
        ("a + b, per call with backward", "aot_eager"),
        ("GPT training step", "eager"),
        ("GPT training step", "aot_eager"),
    ]
    assert all(len(row["samples"]) == 1 and row["value"] > 0 for row in found)
    assert "GPT training step" in capsys.readouterr().out


def test_gpt_starts_at_the_uniform_loss_and_is_causal():
    torch.manual_seed(0)
    model, idx = GPT(SMALL), torch.randint(SMALL.vocab, (3, SMALL.context))
    logits = model(idx)
    assert logits.shape == (3, SMALL.context, SMALL.vocab)
    assert model(idx, idx).item() == pytest.approx(math.log(SMALL.vocab), abs=0.1)
    changed = idx.clone()
    changed[:, -1] = (changed[:, -1] + 1) % SMALL.vocab
    torch.testing.assert_close(model(changed)[:, :-1], logits[:, :-1])


@pytest.mark.parametrize("tied", [False, True])
def test_gpt_trains(tied):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=32, heads=2, context=8, vocab=16, tied=tied))
    assert (model.head.weight is model.tokens.weight) == tied
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    idx = torch.arange(9).repeat(4, 1)
    for _ in range(30):
        loss = model(idx[:, :-1], idx[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
    assert loss.item() < 0.5
