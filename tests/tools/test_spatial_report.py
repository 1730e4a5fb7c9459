"""The page of a program for a spatial machine: small for many chips; in a browser everything leads to the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from browser import Browser
from torch import nn

from tessera.machines.find import spatial_machine
from tessera.machines.spatial import SpatialMachine
from tessera.machines.spatial.read import vary
from tessera.spatial.listing import print_listing
from tessera.spatial.map import map_onto
from tessera.spatial.program import SpatialProgram
from tessera.tools.spatial_report import page, write
from tessera.tools.spatial_report.write import _judged, data

PROGRAM = Browser.find()
LARGEST = 5_000_000  # bytes


def toys(chips: int) -> SpatialMachine:
    links = {
        "chips.count": chips, "chips.topology": "ring", "chips.width": "32 B", "chips.latency": 4, "chips.jitter": 0,
        "chips.gates": [[0, 0]],
    }  # fmt: skip
    return vary(spatial_machine("toy"), links, f"toys{chips}")


@pytest.fixture(scope="module")
def program() -> SpatialProgram:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    return map_onto(model, torch.randn(16, 32), machine="toy", effort="quick")


@pytest.fixture(scope="module")
def path(program: SpatialProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("spatial") / "mlp.html"
    write(program, where)
    return where


def test_the_page_holds_the_program_and_what_was_watched(program: SpatialProgram, path: Path) -> None:
    shown = data(program, _judged(program))
    assert sum(shown["gap"].values()) == program.cycles - program.bound  # type: ignore[attr-defined]
    assert "\n".join(shown["stages"]["listing"]) == print_listing(program.listing, share=False).rstrip("\n")  # type: ignore[index]
    lines = [line for line, _ in shown["critical"]]  # type: ignore[union-attr]
    assert all(shown["stages"]["listing"][line - 1].lstrip().startswith("@") for line in lines)  # type: ignore[index]
    events = json.loads(path.with_suffix(".perfetto.json").read_text())["traceEvents"]
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == program.cycles
    text = path.read_text()
    assert text.count("<script") == 2 and "http:" not in text.replace("http-equiv", "")


def test_sixty_four_chips_make_a_small_page() -> None:
    model = nn.Sequential(nn.Linear(16, 1024), nn.ReLU())
    many = map_onto(model, torch.randn(16, 16), machine=toys(64), chips=64, effort="quick")
    assert len({p.core.chip for p in many.listing.pages}) == 64
    assert len(page(many).encode()) <= LARGEST


@pytest.fixture(scope="module")
def browser():  # noqa: ANN201
    if PROGRAM is None:
        pytest.skip("no Chromium or Chrome is installed")
    opened = Browser(PROGRAM)
    yield opened
    opened.close()


@pytest.fixture
def opened(browser: Browser, path: Path) -> Browser:
    browser.open(path)
    return browser


COLOURS = """((c) => {
    const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data, seen = new Set();
    for (let i = 0; i < d.length; i += 404) seen.add(d[i] * 65536 + d[i + 1] * 256 + d[i + 2]);
    return seen.size;
})(document.querySelector("#%s canvas"))"""
LIT = '[...document.querySelectorAll("#%s .lit")].map((row) => row.textContent)'


def test_everything_is_drawn_without_an_error(opened: Browser, program: SpatialProgram) -> None:
    for section in ("gantt", "mesh", "memory"):
        assert opened.js(COLOURS % section) > 2, section  # type: ignore[operator]
    cycles = opened.js(
        '[...document.querySelectorAll("#gap .bar span")].reduce((s, e) => s + Number(e.dataset.cycles), 0)'
    )
    assert cycles == program.cycles
    assert opened.js('document.querySelectorAll("#critical li").length') > 3  # type: ignore[operator]
    assert opened.js('document.querySelectorAll("#sources tbody tr").length') == len(program.machine.sources)
    assert opened.errors == []


def test_clicks_lead_where_they_say(opened: Browser) -> None:
    opened.js('[...document.querySelectorAll("#critical li")].find((e) => e.textContent.includes("·")).click()')
    (line,) = opened.js(LIT % "listing")  # type: ignore[misc]
    assert "matrix" in line and " · " in line
    (tile,) = opened.js(LIT % "placed")  # type: ignore[misc]
    assert "spatial.multiply" in tile
    source = line.split()[-1]
    assert all(source in text for text in opened.js(LIT % "captured"))  # type: ignore[union-attr]
    # And back, from the tile to its instructions.
    opened.js('document.querySelector("#placed .lit").click()')
    assert line in opened.js(LIT % "listing")  # type: ignore[operator]
    assert opened.errors == []


# The middle of some product that is drawn: the screen's row and column.
DRAWN = """((c) => {
    const { width, height } = c, d = c.getContext("2d").getImageData(0, 0, width, height).data;
    const { left, top } = c.getBoundingClientRect();
    const at = (x, y) => d.subarray(4 * (y * width + x)).subarray(0, 3).join();
    for (let y = height - 1; y > 0; y--)
        for (let x = 0; x < width - 4; x++)
            if (at(x, y) === "37,99,235" && at(x + 4, y) === "37,99,235") return [left + x + 2, top + y];
})(document.querySelector("#gantt canvas"))"""


def test_of_many_cores_the_units_in_sight_are_drawn(browser: Browser, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 1024), nn.ReLU())
    many = map_onto(model, torch.randn(16, 16), machine=toys(64), chips=64, effort="quick")
    write(many, tmp_path / "many.html")
    browser.open(tmp_path / "many.html")
    browser.click_at(*browser.js(DRAWN))  # type: ignore[misc]
    before = browser.js(LIT % "listing")
    browser.js('document.querySelector("#gantt .rows").scrollTop = 1e6')
    browser.frame()
    assert browser.js('document.querySelector("#gantt canvas").clientHeight') < 500  # type: ignore[operator]
    browser.click_at(*browser.js(DRAWN))  # type: ignore[misc]
    (after,) = browser.js(LIT % "listing")  # type: ignore[misc]
    assert "matrix" in after and [after] != before
    assert browser.js('document.querySelector("#tooltip").textContent').startswith("63:")  # type: ignore[attr-defined]
    assert browser.errors == []
