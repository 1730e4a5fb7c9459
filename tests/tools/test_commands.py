"""The commands that look into programs: run, explain, trace, op, cache, tile-opt; and what they answer to nonsense."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from planted import own_pipelines

import tessera
from tessera.ops.op import registry
from tessera.tile.dialect.text import to_text
from tessera.tools import cli, doctor
from tessera.tools.op import overloads
from tessera.util import disk

SCRIPT = """
import sys
import torch

def f(x, w):
    h = torch.relu(x @ w)
    print("in the middle", sys.argv[1:])
    y = h.sin() + h.cos()
    return y.sort().values * 2

fast = torch.compile(f, backend="inductor", mode="reduce-overhead")
w = torch.randn(8, 8)
fast(torch.randn(4, 8), w)
fast(torch.randn(6, 8), w)
assert __name__ == "__main__" and sys.modules["__main__"].f is f
sys.exit(3)
"""


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.lstrip())
    return "script.py"


def written(tmp_path, text: str) -> str:
    path = tmp_path / "other.py"
    path.write_text(textwrap.dedent(text).lstrip())
    return str(path)


def test_run_is_the_script_and_a_summary(script, capsys):
    compile_before, argv, main = torch.compile, sys.argv, sys.modules["__main__"]
    assert cli.main(["run", script, "--flag", "a"]) == 3
    shown = capsys.readouterr()
    assert shown.out.count("in the middle ['--flag', 'a']") == 2
    for fact in ("graphs", "graph breaks", "recompiles", "compiling", "aten"):
        assert fact in shown.err
    assert (torch.compile, sys.argv, sys.modules["__main__"]) == (compile_before, argv, main)


def test_run_gives_json_alone_on_standard_output(script, capsys):
    assert cli.main(["run", "--json", "--executors", "tile,aten", script]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["graphs"], found["breaks"], found["recompiles"], found["eager"]) == (4, 2, 2, 0)
    assert found["exit_code"] == 3 and found["executors"]["tile"] == 6


def test_explain_names_a_break_a_recompile_and_what_is_not_fused(script, capsys):
    """With the user's own file and line for each."""
    assert cli.main(["explain", "--executors", "tile,aten", script]) == 3
    lines = " ".join(capsys.readouterr().out.split())
    assert "graph break script.py:6: Failed to trace builtin operator" in lines
    assert "tensor 'x' size mismatch at index 0. expected 4, actual 6 (called at script.py:13)" in lines
    assert "mark_dynamic(tensor, 0)" in lines
    assert "not fused aten.sort.default has no lowering: sort (aten.sort) at script.py:8" in lines
    assert "tile fused aten.sin, aten.cos, aten.add at script.py:7" in lines
    assert "measured peak" in lines


def test_explain_as_json(script, capsys):
    assert cli.main(["explain", "--json", "--no-measure", script]) == 3
    found = json.loads(capsys.readouterr().out)
    first = found["graphs"][0]
    assert (first["location"], first["break_line"], first["called_at"]) == (
        "script.py:5",
        "script.py:6",
        "script.py:12",
    )
    assert first["inputs"] == ["x: f32[4, 8]", "w: f32[8, 8]"]
    assert "x: float32[4, 8]" in first["guards"]
    assert "print" in first["break_advice"]
    assert found["graphs"][2]["recompile_change"] == "4 → 6"
    assert first["memory"][0]["measured"] is None and first["memory"][0]["predicted"]["peak"] == 128


def test_a_failing_script_fails_as_python_does(tmp_path, capsys):
    path = written(tmp_path, "def f():\n    raise ValueError('planted')\nf()\n")
    assert cli.main(["run", path]) == 1
    shown = capsys.readouterr().err
    assert "ValueError: planted" in shown and "other.py" in shown and "session.py" not in shown


def test_exit_messages_and_compile_forms(tmp_path, capsys):
    path = written(
        tmp_path,
        """
        import torch, tessera
        @torch.compile(fullgraph=True)
        def f(x): return x.sin()
        @tessera.jit(frontend="functional")
        def g(x): return x.cos()
        class Model(torch.nn.Module):
            def forward(self, x): return x.tan()
        model = Model()
        model.compile()
        plain = torch.compile(lambda x: x + 1, disable=True)
        x = torch.ones(2)
        f(x); g(x); model(x); plain(x)
        raise SystemExit("said no")
        """,
    )
    assert cli.main(["run", "--json", path]) == 1
    shown = capsys.readouterr()
    assert "said no" in shown.err and json.loads(shown.out)["graphs"] == 3


def test_trace_prints_lists_and_saves(script, tmp_path, capsys):
    assert cli.main(["trace", "--list", "--json", script]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {row["graph"] for row in listed} == {"f_0", "f_1", "f_2", "f_3"}
    assert cli.main(["trace", "--stage", "dce", "script.py:f_1"]) == 0
    assert "aten.sort(" in capsys.readouterr().out
    assert cli.main(["trace", "-o", str(tmp_path / "out.py"), "script.py:f"]) == 0
    scope: dict = {}
    exec((tmp_path / "out.py").read_text(), scope)
    assert callable(scope.get("f_1") or scope["f_3"])  # Dynamo may remember that the size changes


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "absent.py"], "found no file 'absent.py'"),
        (["explain", "empty.py"], "compiled nothing"),
        (["trace", "--stage", "nonsense", "script.py"], "expected one of captured"),
        (["trace", "script.py:g"], "no graph of 'g'; there are f_0"),
        (["run", "--executors", "nobody", "script.py"], "unknown executor 'nobody'"),
        (["op", "gellu"], "nearest: aten.gelu"),
        (["op", "aten.sum.nonsense"], "has no overload 'nonsense'"),
        (["cache", "--kind", "nonsense"], "no entries of kind 'nonsense'"),
        (["tile-opt", "absent.mlir"], "absent.mlir"),
        (["tile-opt", "bytes.mlir"], "expected MLIR text"),
        (["bench", "core", "--only", "nonsense"], "choose from"),
    ],
)
def test_nonsense_is_one_line_and_exit_code_2(arguments, message, script, tmp_path, capsys):
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "bytes.mlir").write_bytes(b"\xff\xfe\x00")
    assert cli.main(arguments) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told


@pytest.mark.parametrize(
    "arguments",
    ["report -o", "profile --chrome", "repro -o", "trace -o", "bench core --json", "check --battery --json"],
)
def test_a_file_that_cannot_be_written_is_found_before_the_work(arguments, tmp_path, capsys, monkeypatch):
    (tmp_path / "script.py").write_text("raise SystemExit('it runs')")
    path = tmp_path / "missing" / "file"
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments.split(), str(path), str(tmp_path / "script.py")])
    assert ended.value.code == 2
    assert f"{path}: the folder {path.parent} does not exist" in capsys.readouterr().err


def test_op_tells_where_rules_stand(capsys):
    """Also in a process that has imported nothing else: rules stand in tables that imports fill."""
    command = [sys.executable, "-m", "tessera.tools.cli", "op", "--json", "gelu"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = {row["rule"]: row for row in json.loads(told)["aten.gelu.default"]}
    assert rows["vjp"]["where"].startswith("tessera/ops/activation.py:")
    assert rows["tile lowering"]["where"].startswith("tessera/tile/from_trace/lower/activation.py:")
    assert list(rows) == [
        "declared", "type", "vjp", "jvp", "batching", "cost", "tile lowering", "decomposition",
    ]  # fmt: skip
    assert cli.main(["op", "aten::softmax.int"]) == 0
    assert "decompose/nn.py" in capsys.readouterr().out


def test_op_lines_are_the_declarations():

    path, _, line = registry()["aten.sin"].where.rpartition(":")
    with open(path) as file:
        assert '"aten.sin"' in file.read().splitlines()[int(line) - 1]
    assert [str(op) for op in overloads("aten.sum.dim_IntList")] == ["aten.sum.dim_IntList"]


def test_cache_lists_measures_and_clears(capsys):
    disk.store("schedule", "key", b"data")
    assert cli.main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kinds"]["schedule"]["files"] == 1
    assert cli.main(["cache", "list"]) == 0
    assert disk.digest("key")[:8] in capsys.readouterr().out
    assert cli.main(["cache", "clear", "--kind", "schedule"]) == 0
    assert "removed 1 files" in capsys.readouterr().out
    assert disk.load("schedule", "key") is None


def test_tile_opt_runs_kernels(tmp_path, capsys):
    fast = tessera.jit(lambda x: torch.softmax(x.sin(), -1), executors=["tile", "aten"], dynamic=True)
    fast(torch.randn(4, 16))
    (region,) = tessera.stages(fast)["claim"].trace.equations
    (tmp_path / "k.mlir").write_text(to_text(region.op.kernel.tile))
    names = [s.data for s in region.op.kernel.tile.symbol_names]
    assert cli.main(["tile-opt", "--run", "--json", "--sizes", ",".join(f"{n}=5" for n in names), "k.mlir"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert cli.main(["tile-opt", "--run", "--sizes", "nothing=5", "k.mlir"]) == 2
    assert "no symbol 'nothing'" in capsys.readouterr().err
    x = torch.randn(25, generator=torch.Generator().manual_seed(0)).reshape(5, 5)
    assert row["elements"] == 25
    assert row["first"] == pytest.approx(torch.softmax(x.sin(), -1)[0, :4].tolist(), rel=1e-5)


def test_doctor_as_json_names_targets_executors_and_remedies(capsys, monkeypatch):
    monkeypatch.setitem(doctor.OPTIONAL, "nonsense-package", ("nothing", "pip install nonsense"))
    code = cli.main(["doctor", "--json"])
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert code == any(row["ok"] is False for row in found.values())
    assert found["target cpu"]["ok"] and found["executor aten"]["ok"]
    assert found["nonsense-package"]["found"].endswith("try: pip install nonsense")


def test_the_command_in_a_process_of_its_own(script):
    done = subprocess.run(
        [sys.executable, "-m", "tessera.tools.cli", "run", script, "x"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 3, done.stderr
    assert "in the middle ['x']" in done.stdout and "graph breaks" in done.stderr
    assert "leaked" not in done.stderr  # what libraries with bindings of their own report at exit


PLANTED = """
import torch
from tessera.pipeline.lists import insert
from tessera.pipeline.stage import Stage

def wrong(trace):
    swap = {torch.ops.aten.erf.default: torch.ops.aten.tanh.default}
    return trace.with_(equations=tuple(e.with_(op=swap.get(e.op, e.op)) for e in trace.equations))

def refuse(trace):
    if any(e.op is torch.ops.aten.erf.default for e in trace.equations):
        raise KeyError("planted")
    return trace

insert(Stage("planted", STEP, "a test"), before="dce")

@torch.compile
def f(x, w):
    return (torch.erf(x @ w) + x).softmax(-1).pow(2).sum()

x, w = torch.randn(16, 16), torch.randn(16, 16, requires_grad=True)
f(x, w).backward()
"""


@pytest.fixture
def unplanted(monkeypatch):
    own_pipelines(monkeypatch)


def test_check_names_what_is_wrong_in_a_script(tmp_path, capsys, unplanted):
    path = written(tmp_path, PLANTED.replace("STEP", "wrong"))
    assert cli.main(["check", "--json", path]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["faults"][0]["guilty"] == "pass 'planted'"
    assert found["faults"][0]["line"] == "other.py:18"
    assert cli.main(["check", path]) == 1
    assert "first wrong equation: erf = aten.tanh(" in capsys.readouterr().out


def test_check_of_a_right_script(script, capsys):
    assert cli.main(["check", "--executors", "tile,aten", script]) == 3  # its own exit code
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize("step, outcome", [("wrong", "wrong"), ("refuse", "raises KeyError")])
@pytest.mark.filterwarnings("ignore:Tessera could not compile")
def test_repro_writes_a_small_script(step, outcome, tmp_path, capsys, unplanted):
    path = written(tmp_path, PLANTED.replace("STEP", step))
    assert cli.main(["repro", "--json", "-o", "repro.py", path]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "repro.py", "outcome": outcome, "equations": 1, "of": 6}
    assert "aten.erf(" in (tmp_path / "repro.py").read_text()


def test_repro_of_a_right_script_says_so(script, capsys):
    assert cli.main(["repro", script]) == 0
    assert re.search(r"nothing fails in script.py: \d+ graphs compile and are right", capsys.readouterr().out)
