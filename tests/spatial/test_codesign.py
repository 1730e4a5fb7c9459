"""Co-design: on machines that are short of one thing it names that thing; its numbers are those of recompiling."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import tessera
from tessera.ir.trace import Trace
from tessera.machines.spatial import SpatialMachine
from tessera.machines.spatial.read import vary
from tessera.spatial.capture import captured
from tessera.spatial.codesign.fields import DIALS, axis
from tessera.spatial.codesign.points import Bench, Point
from tessera.tools.cli import main
from tessera.util.errors import OptionError
from tests.spatial.nets import MLP, Block

# Plenty of everything, for four cores.
AMPLE = {
    "matrix.rows": 32, "matrix.columns": 32, "vector.lanes": 512, "sram.size": "1 MiB", "sram.width": "512 B",
    "sram.banks": 2, "sram.read_ports": 2, "sram.write_ports": 2, "copy.engines": 2, "link.width": "512 B",
    "link.latency": 1, "host.width": "512 B",
}  # fmt: skip
# What a machine is short of -> its fields, the model that shows it, and the fields that may be named first.
SHORT = {
    "SRAM": ({"sram.size": "20 KiB"}, "small", {"sram.size"}),
    "a port": ({"sram.width": "8 B"}, "mlp", {"sram.width", "sram.read_ports", "sram.write_ports"}),
    "a link": ({"link.width": "2 B"}, "mlp", {"link.width"}),
    "hops": ({"link.latency": 400}, "block", {"link.latency"}),
    "vector lanes": ({"vector.lanes": 4}, "block", {"vector.lanes"}),
    "the array": ({"matrix.rows": 4, "matrix.columns": 4}, "mlp", {"matrix.rows", "matrix.columns", "matrix.count"}),
}


def machine(**changes: object) -> SpatialMachine:
    toy = tessera.machine("toy")
    assert isinstance(toy, SpatialMachine)
    return vary(toy, AMPLE | changes, "short")


def model(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    models = {"small": (MLP(32, 128), (16, 32)), "mlp": (MLP(64, 128), (32, 64)), "block": (Block(32, 4), (1, 16, 32))}
    made, shape = models[name]
    return made, torch.randn(shape)


@pytest.mark.parametrize("thing", SHORT)
def test_it_names_what_a_machine_is_short_of(thing: str) -> None:
    changes, name, fields = SHORT[thing]
    found = tessera.codesign(*model(name), machine=machine(**changes))
    assert found.asks[0].dial.name in fields, str(found)
    assert len(found.asks) <= 3 and found.asks == sorted(found.asks, key=lambda ask: -ask.gain)
    assert found.together is not None and found.together.seconds <= found.base.seconds


def test_elasticities_are_those_of_recompiling() -> None:
    lanes = machine(**{"vector.lanes": 20})
    found = tessera.codesign(*model("block"), machine=lanes, vary={"vector.lanes": "x1"})
    slope = next(e for e in found.elasticities if e.dial.name == "vector.lanes")
    cycles = [
        tessera.map_onto(*model("block"), machine=vary(lanes, {"vector.lanes": value}), effort="quick").cycles
        for value in (18, 22)
    ]
    assert not slope.coarse
    assert slope.percent == pytest.approx(math.log(cycles[0] / cycles[1]) / math.log(22 / 18), abs=0.02)
    assert slope.percent > 0.1


def test_a_sweep_has_a_front_and_an_end() -> None:
    extra = {"area.chip": "10 mm2", "area.vector": "0.01 mm2"}
    values = {"vector.lanes": [4, 32, 4096, 8192]}
    found = tessera.codesign(*model("block"), machine=machine(**extra, **{"vector.lanes": 8}), vary=values)
    assert [p.changes.get("vector.lanes", 8) for p in found.points] == [4, 8, 32, 4096, 8192]
    times = [p.seconds for p in found.points]
    assert times == sorted(times, reverse=True), "more lanes never cost time"
    areas = [p.area or 0.0 for p in found.points]
    assert areas == sorted(areas) and areas[1] == 10 and areas[0] == pytest.approx(10 - 4 * 4 * 0.01)
    # Every point of the front is faster than those with a smaller chip.
    assert [p.area or 0.0 for p in found.front] == sorted((p.area or 0.0 for p in found.front), reverse=True)
    (knee,) = found.knees
    assert knee.within and knee.value in (32, 4096)
    text, data = str(found), found.data()
    assert f"vector.lanes: beyond {knee.value}" in text and "What to ask for:\n  1. vector.lanes = 16" in text
    assert data["machine"] == "short" and found.base.joules is not None and found.base.joules > 0
    assert "mm²" in text and "numbers of short are assumed" in text


def test_a_point_is_no_slower_than_a_poorer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is, it is compiled with the tiles of that one too; whichever was asked for first."""
    asked: list[tuple[dict, bool]] = []

    def point(bench: Bench, changes: dict, like: SpatialMachine | None = None) -> Point:
        asked.append((changes, like is not None))
        width = changes.get("link.width", 512)
        return Point(changes, width if like is None else 100, float(width if like is None else 100))

    monkeypatch.setattr(Bench, "_point", point)
    for order in ((128, 256), (256, 128)):
        bench = Bench(captured(Trace("none", (), (), ()), (), {}), machine(), 1, "quick", 0)
        for width in order:
            bench.point({"link.width": width})
        assert bench.point({"link.width": 256}).seconds == 100 and bench.point({"link.width": 128}).seconds == 128
    assert asked == [({"link.width": w}, like) for w, like in ((128, False), (256, False), (256, True))] + [
        ({"link.width": w}, like) for w, like in ((256, False), (128, False), (256, True))
    ]
    one, other = Point({"matrix.rows": 16}, 1, 1.0), Point({"matrix.rows": 32}, 2, 2.0)
    assert not bench.poorer(one, other), "a larger array takes longer to fill"
    assert bench.poorer(Point({"link.latency": 9}, 1, 1.0), Point({"link.latency": 2}, 2, 2.0))


def test_what_does_not_fit_is_a_point_that_says_so() -> None:
    found = tessera.codesign(*model("small"), machine=machine(), vary={"sram.size": ["4 KiB"]})
    refused = found.points[0]
    assert not refused.fits and "weights" in refused.reason and refused not in found.front
    assert refused.data()["seconds"] is None


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ("32KiB..128 KiB", [32768, 65536, 131072]),
        ("x0.5..x2", [32768, 65536, 131072]),
        (["32 KiB", "x1"], [32768, 65536]),
        ("48 KiB, 32 KiB", [32768, 49152, 65536]),
    ],
)
def test_values_are_written_in_many_ways(given: object, values: list[int]) -> None:
    toy = tessera.machine("toy")
    assert isinstance(toy, SpatialMachine)
    assert axis(toy, "sram.size", given, 3) == (DIALS["sram.size"], values)
    dial, widths = axis(toy, "link.bandwidth", "16GB/s..64GB/s", 3)
    assert dial.name == "link.width" and widths == [16, 32, 64]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "got an empty sweep"),
        ("sram.size", "expected fields and values.*got 'sram.size'"),
        ({"sram.size": []}, "sram.size: expected at least one value"),
        ({"sram.sise": "x2"}, "no field 'sram.sise'.*did you mean sram.size"),
        ({"dram.size": "x2"}, "no field 'dram.size' to vary"),
        ({"sram.size": "250..1000"}, 'such as "64 B".*without its unit'),
        ({"vector.lanes": "32 B"}, "vector.lanes: expected numbers such as 64"),
        ({"sram.size": "x2 B"}, "or factors such as x2"),
        ({"sram.size": "1 GB..1 MB"}, "from a smaller value to a larger one"),
        ({"link.width": "x2", "link.bandwidth": "x2"}, "each field once"),
        (
            {"sram.size": "x1..x2", "link.width": [f"{i} B" for i in range(1, 99)], "vector.lanes": "x1..x2"},
            "at most 256 points",
        ),
    ],
)
def test_bad_sweeps_are_one_clear_line(given: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message) as error:
        tessera.codesign(nn.ReLU(), torch.randn(2), machine="toy", vary=given)
    assert "\n" not in str(error.value)


def test_files_go_in(tmp_path: Path) -> None:
    """An artifact, and an ONNX file whose numbers decide sizes; each is captured once."""
    pytest.importorskip("onnx")

    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(0) + x.split([1, 3])[0]

    x, path = torch.randn(4, 8), tmp_path / "half.onnx"
    tessera.onnx.export(Half(), (x,), path)
    tessera.export(Half(), (x,), tmp_path / "half.tess")
    for model in (Half(), tessera.onnx.load(path), tessera.load(tmp_path / "half.tess")):
        found = tessera.codesign(model, x, machine="toy", vary={"vector.lanes": [1, 32]})
        assert found.points[0].seconds > found.points[1].seconds and found.data()["machine"] == "toy"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "model.py"
    script.write_text("import torch\n\n\ndef make():\n    return torch.nn.Linear(16, 16), (torch.randn(4, 16),)\n")
    source = f"{script}:make"
    told = str(tmp_path / "front.html")
    options = ["--vary", "vector.lanes=x1..x2", "--points", "2", "--json", "--report", told]
    assert main(["codesign", source, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    text = Path(told).read_text()
    chart = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    titles = [title.text for title in chart.iter("title")]
    assert len(titles) == len(found["points"]) and len(chart.findall("./g/circle")) == len(found["front"])
    assert any(title.startswith("vector.lanes = 64: ") for title in titles if title) and "<script" not in text
    assert found["machine"] == "toy" and len(found["points"]) == 2 and len(found["asks"]) <= 3
    assert main(["codesign", source, "--vary", "vector.lanes"]) == 2
    assert "expected FIELD=VALUES" in capsys.readouterr().err
    files = [str(tmp_path / name) for name in ("m.prom", "m.html")]
    options = ["--effort", "quick", "--cut", "best", "--json"]
    assert main(["map", source, "--metrics", files[0], "--report", files[1], *options]) == 0
    cycles = json.loads(capsys.readouterr().out)["cycles"]
    assert f'tessera_spatial_cycles{{machine="toy"}} {cycles}' in Path(files[0]).read_text()
    assert Path(files[1]).stat().st_size > 10_000 and (tmp_path / "m.perfetto.json").is_file()


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, by: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * by


def test_artifacts_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, path, two = torch.randn(4, 8), str(tmp_path / "m.tess"), str(tmp_path / "two.tess")
    tessera.export(Scaled(), (x,), path, kwargs={"by": x})
    assert main(["map", path, "--effort", "quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cycles"] > 0
    assert main(["codesign", path, "--vary", "vector.lanes=x1..x2", "--points", "2"]) == 0
    assert "the front" in capsys.readouterr().out.lower()
    tessera.export({"a": (nn.Linear(8, 8), (x,)), "b": (nn.Linear(8, 4), (x,))}, path=two)
    assert main(["map", two]) == 2 and "expected an artifact of one entry, got a, b" in capsys.readouterr().err
    assert main(["map", "model.txt"]) == 2 and ".onnx or .tess, got" in capsys.readouterr().err
