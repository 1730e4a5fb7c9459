"""The report: what its data says, that it holds together, and that no string in it can become anything but text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import tessera
from tessera.just_in_time.compiled import compiled_state
from tessera.tools.models import GPT, GPTConfig
from tessera.tools.report.collect import collect
from tessera.tools.report.shown import LONGEST, Report
from tessera.tools.report.write import embedded, page
from tessera.util.errors import InputError

SMALL = GPTConfig(layers=2, width=32, heads=2, context=8, vocab=16)


def data_of(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found[1])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    torch._dynamo.reset()
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("report") / "report.html"
    tokens = torch.randint(SMALL.vocab, (2, SMALL.context))
    fast = tessera.jit(GPT(SMALL), executors=["sdpa", "tile", "aten"])
    tessera.report(fast, path, args=(tokens, tokens), steps=2)
    return fast, path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def data(written):
    return data_of(written[1])


def test_every_stage_is_there_line_by_line(written, data):
    (graph,) = data["graphs"]
    stages = tessera.stages(written[0])
    assert [s["name"] for s in graph["stages"]] == [s.name for s in stages]
    for told, stage in zip(graph["stages"], stages, strict=True):
        assert told["equations"] == len(stage.trace.equations)
        text = "\n".join(data["lines"]["text"][i] for i in told["lines"])
        functions = [line for line in text.splitlines() if line.startswith("def ")]
        assert functions[-1].startswith(f"def {stage.trace.name}(")  # equal blocks stand above it, once
        assert text.rstrip().splitlines()[-1].strip().startswith("return")
        for eqn in stage.trace.equations[:5]:
            assert eqn.results()[0].name in text


def test_equal_lines_stand_once(data):
    shown = sum(len(stage["lines"]) for graph in data["graphs"] for stage in graph["stages"])
    columns = data["lines"]
    assert len({len(column) for column in columns.values()}) == 1
    assert len(columns["text"]) < shown / 3


def test_lines_lead_to_the_source_and_back(data):
    (file,) = [f for f in data["files"] if f["path"].endswith("models.py")]
    number = data["files"].index(file)
    assert any("F.gelu" in line for line in file["lines"])
    for text, places in zip(data["lines"]["text"], data["lines"]["places"], strict=True):
        if "aten.gelu(" in text:
            where = {(data["places"][p][0], data["places"][p][1]) for p in places}
            assert {f for f, _ in where} == {number}
            assert all("F.gelu" in file["lines"][line - 1] for _, line in where)


def test_regions_lead_to_their_kernel_and_body(data):
    lines = data["lines"]
    regions = [i for i, kernel in enumerate(lines["kernel"]) if kernel >= 0]
    assert regions and all("tile.region" in lines["text"][i] for i in regions)
    assert all(lines["body"][i] and lines["places"][i] for i in regions)
    assert len(data["kernels"]) < len(regions)
    for kernel in data["kernels"]:
        assert kernel["language"] == "LLVM IR" and "define" in kernel["source"]
        assert "tile.kernel" in kernel["tile"] and "def launch" in kernel["launch"] and kernel["operators"]


def test_programs_have_their_equations_and_memory(written, data):
    compilation = compiled_state(written[0]).compilations()[0]
    (graph,) = data["graphs"]
    assert [p["name"] for p in graph["programs"]] == ["forward", "backward"]
    for told, program in zip(graph["programs"], compilation.account.programs, strict=True):
        assert len(told["equations"]) == len(told["live"]) == len(told["measured"]) == len(program.trace.equations)
        for line, eqn in zip(told["equations"], program.trace.equations, strict=True):
            assert all(v.name in data["lines"]["text"][line] for v in eqn.results())
        stage = graph["stages"][told["stage"]]
        assert set(told["equations"]) <= set(stage["lines"])
    forward, backward = graph["programs"]
    assert forward["base"] == 0 and backward["base"] == compilation.account.saved_bytes > 0
    assert forward["live"][-1] >= compilation.account.saved_bytes  # what backward needs is alive at the end


def test_profile_rows_name_their_equations(data):
    profile = data["profile"]
    columns = {name: i for i, name in enumerate(profile["columns"])}
    for row in profile["rows"]:
        program = data["graphs"][row[columns["graph"]]]["programs"][row[columns["program"]]]
        text = data["lines"]["text"][program["equations"][row[columns["index"]]]]
        if row[columns["executor"]] == "aten":
            assert row[columns["operator"]].split(".", 1)[1] in text
    assert len(profile["spans"]) > len(profile["rows"])
    assert all(0 <= name < len(profile["names"]) for name, *_ in profile["spans"])


def test_nothing_comes_from_elsewhere(written):
    text = written[1]
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)\s*=\s*["']""", text.split('id="data"')[0])
    script = text.rsplit("<script>", 1)[1]
    for word in ("fetch(", "XMLHttpRequest", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in script


def test_strings_cannot_leave_their_place():
    evil = {"title": "</title><script>alert(1)</script>", "text": "</script><!--<script>\u2028&amp;"}
    text = embedded(evil)
    assert json.loads(text) == evil
    assert not set("<>&\u2028\u2029") & set(text)
    whole = page(evil)
    assert whole.count("<script") == 2 and "alert(1)</script>" not in whole
    assert "&lt;/title&gt;" in whole


def test_a_value_that_looks_like_a_mark_is_not_replaced():
    whole = page({"title": "%%DATA%%", "text": "%%SCRIPT%%"})
    assert "<title>%%DATA%% ·" in whole and data_of(whole)["text"] == "%%SCRIPT%%"


def test_the_source_of_a_user_is_data(tmp_path):
    module = tmp_path / "evil.py"
    module.write_text(
        "import torch\n\ndef evil(x):\n    note = '</script><img src=x onerror=alert(1)>'\n    return torch.sin(x)\n"
    )
    scope: dict = {}
    exec(compile(module.read_text(), str(module), "exec"), scope)
    torch._dynamo.reset()
    fast = tessera.jit(scope["evil"])
    tessera.report(fast, tmp_path / "r.html", args=(torch.ones(3),), steps=1)
    text = (tmp_path / "r.html").read_text()
    assert "<img src=x" not in text
    assert any("<img src=x" in line for f in data_of(text)["files"] for line in f["lines"])


def test_without_arguments_nothing_is_run(tmp_path):
    torch._dynamo.reset()
    calls = []
    fast = tessera.jit(lambda x: F.relu(x) + 1, frontend="functional")
    with pytest.raises(InputError, match="nothing is compiled yet"):
        tessera.report(fast, tmp_path / "r.html")
    fast(torch.ones(3))
    compilation = compiled_state(fast).compilations()[0]
    call = compilation.executable.call
    compilation.executable.call = lambda *args: calls.append(1) or call(*args)
    tessera.report(fast, tmp_path / "r.html")
    assert not calls and data_of((tmp_path / "r.html").read_text())["profile"] is None
    with pytest.raises(InputError, match="expected what tessera.jit gave"):
        tessera.report(torch.sin, tmp_path / "r.html")


def test_graphs_that_broke_or_run_eagerly_are_told(tmp_path):
    torch._dynamo.reset()

    def f(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    fast = tessera.jit(f)
    fast(torch.ones(3))
    graphs = collect([compiled_state(fast)], None, "f")["graphs"]
    assert len(graphs) == 2 and graphs[0]["break_reason"] and "test_report.py" in graphs[0]["break_line"]


def test_the_page_travels_with_the_package():
    from importlib.resources import files

    names = {entry.name for entry in (files("tessera.tools.report") / "page").iterdir()}
    assert {"report.html", "report.css", "app.js", "model.js"} <= names


def test_linear_without_kernels_still_reports(tmp_path):
    torch._dynamo.reset()
    fast = tessera.jit(nn.Linear(3, 3), executors=["aten"])
    tessera.report(fast, tmp_path / "r.html", args=(torch.ones(2, 3),), steps=1)
    assert data_of((tmp_path / "r.html").read_text())["kernels"] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_report_on_a_gpu(tmp_path):
    torch._dynamo.reset()
    model = GPT(GPTConfig(layers=2, width=128, heads=2, context=64)).to("cuda", torch.bfloat16)
    tokens = torch.randint(256, (4, 64), device="cuda")
    fast = tessera.jit(model, executors=["sdpa", "tile", "aten"])
    tessera.report(fast, tmp_path / "r.html", args=(tokens, tokens), steps=2)
    data = data_of((tmp_path / "r.html").read_text())
    assert any(kernel["language"] == "Triton" and "@triton.jit" in kernel["source"] for kernel in data["kernels"])
    assert any(track.startswith("GPU") for track in data["profile"]["tracks"])
    for program in data["graphs"][0]["programs"]:
        assert program["measured"] and max(program["measured"]) > 0


class Frames(HTMLParser):
    """The attributes of every element that HTML holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_notebook_shows_the_page_in_a_frame_without_rights(tmp_path):
    torch._dynamo.reset()
    fast = tessera.jit(lambda x: x.sin() + '"><script>alert(1)</script>'.count("t"))
    fast(torch.ones(3))
    path = tmp_path / "report.html"
    shown = tessera.report(fast, path)
    ((tag, attributes),) = Frames(shown._repr_html_()).found  # one frame: whatever the page holds, it stays inside
    assert tag == "iframe" and attributes["sandbox"] == "allow-scripts"
    assert attributes["srcdoc"] == path.read_text(encoding="utf-8")
    assert re.search(r"height: \d+px", attributes["style"])
    assert len(repr(shown)) < 200 and str(path) in repr(shown) and "\n" not in repr(shown)


def test_a_report_needs_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    fast = tessera.jit(lambda x: x.sin())
    fast(torch.ones(3))
    shown = tessera.report(fast)
    assert not list(tmp_path.iterdir()) and "not written" in repr(shown)
    shown.save("report.html")
    assert data_of((tmp_path / "report.html").read_text(encoding="utf-8"))["graphs"]


def test_a_page_too_long_for_a_notebook_is_a_link(tmp_path):
    path = tmp_path / "a & b.html"
    long = Report("<b>", "x" * (LONGEST + 1), path)
    assert [tag for tag, _ in Frames(long._repr_html_()).found] == ["p", "a"]
    assert "a%20%26%20b.html" in long._repr_html_() and len(long._repr_html_()) < 1000
    assert "save" in Report("f", "x" * (LONGEST + 1))._repr_html_()
