"""The report in a real browser: a 24-layer model's training step opens fast, and everything in it leads to the rest."""

from __future__ import annotations

import re

import pytest
import torch
from browser import Browser

import tessera
from tessera.just_in_time.compiled import compiled_state
from tessera.tools.models import GPT, GPTConfig
from tessera.tools.report.shown import Report
from tessera.tools.report.write import write

PROGRAM = Browser.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium or Chrome is installed")


# How many colours a chart shows.
COLOURS = """((c) => {{
    const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data, seen = new Set();
    for (let i = 0; i < d.length; i += 404) seen.add(d[i] * 65536 + d[i + 1] * 256 + d[i + 2]);
    return seen.size;
}})(document.querySelector("#view-{} canvas"))"""
# The numbers of both sides of every row of a comparison that is drawn; 0 where a side has nothing.
NUMBERS = """[...document.querySelectorAll("#differences .row")].map((row) => [Number(row.dataset.i),
    ...[...row.children].map((half) => Number(half.querySelector(".gutter")?.textContent || 0))])"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=24, width=32, heads=2, context=8, vocab=64))
    tokens = torch.randint(64, (2, 8))
    where = tmp_path_factory.mktemp("report") / "report.html"
    fast = tessera.jit(model, executors=["sdpa", "tile", "aten"])
    tessera.report(fast, where, args=(tokens, tokens), steps=2)
    return where


@pytest.fixture(scope="module")
def browser():
    made = Browser(PROGRAM)
    yield made
    made.close()


@pytest.fixture
def page(browser, path):
    browser.dark(False)
    browser.open(path)
    yield browser
    assert browser.errors == []


def texts(page: Browser, selector: str) -> list[str]:
    return page.js(f"[...document.querySelectorAll('{selector}')].map((e) => e.textContent)")


def tab(page: Browser, name: str) -> None:
    page.click(f"#tab-{name}")
    assert page.js(f"document.querySelector('#tab-{name}').getAttribute('aria-selected')") == "true"


def stage(page: Browser, name: str) -> None:
    page.choose("#stage", [t.rsplit(" (", 1)[0] for t in texts(page, "#stage option")].index(name))


def search(page: Browser, text: str) -> None:
    page.click("#search")
    page.js("document.querySelector('#search').select()")
    page.type(text)


def test_opens_small(browser, path):
    """What a browser has to read and to lay out is bounded: it then opens fast anywhere."""
    assert path.stat().st_size < 15e6
    browser.open(path)
    assert browser.errors == []
    assert browser.js("document.querySelectorAll('*').length") < 3000


def test_every_view_opens(page):
    for name in ("program", "compare", "timeline", "memory", "roofline", "profile", "overview"):
        tab(page, name)
        assert page.js(f"!document.querySelector('#view-{name}').hidden && location.hash === '#{name}'")
    for canvas in ("timeline", "memory", "roofline"):
        tab(page, canvas)
        assert page.js(COLOURS.format(canvas)) > 3


def test_a_line_of_the_source_leads_to_trace_and_kernel(page):
    tab(page, "program")
    stage(page, "captured")
    page.js("document.querySelector('#source').scrollTop = 55 * 20")
    page.frame()
    at = next(i for i, t in enumerate(texts(page, "#source .row")) if "x = x + self.attention(self.norm1(x))" in t)
    at += int(page.js("Number(document.querySelector('#source .row').dataset.i)"))
    page.click(f"#source .row[data-i='{at}'] .text")
    assert any("self.norm1(x)" in t for t in texts(page, "#source .row.pinned"))
    pinned = texts(page, "#trace .row.pinned")
    assert pinned and all("models.py:68" in t for t in pinned)
    assert any("aten.add(" in t or "aten.layer_norm(" in t for t in pinned)
    assert any("define" in t or "target triple" in t for t in texts(page, "#kernel .row"))


def test_a_kernel_leads_back_to_trace_and_source(page):
    tab(page, "program")
    stage(page, "forward reinplace")
    search(page, "tile.region")
    page.click("#trace .row[data-i='2'] .text")
    kernel = page.js(
        "document.querySelector('#kernel').closest('.pane').querySelector('select').selectedOptions[0].textContent"
    )
    assert "LLVM IR" in kernel
    assert any("models.py" in t for t in texts(page, "#trace .row.pinned"))
    assert texts(page, "#source .row.pinned")
    uses = texts(page, ".chips button")
    assert len(uses) > 20  # the layers share it
    page.click(".chips button:nth-of-type(5)")
    assert any(uses[4] in t for t in texts(page, "#trace .row.pinned"))
    page.click("#kernel .row[data-i='3'] .text")  # the kernel itself: every line it runs
    assert len(texts(page, "#trace .row.pinned")) > 5
    assert texts(page, "#source .row.pinned")
    for name, word in (("Tile program", "tile.kernel"), ("Region", "aten."), ("Launch", "def launch")):
        page.js(f"[...document.querySelectorAll('.segments button')].find((b) => b.textContent === '{name}').click()")
        page.frame()
        assert word in " ".join(texts(page, "#kernel .row"))


def test_pointing_marks_what_belongs_together(page):
    tab(page, "program")
    stage(page, "captured")
    page.js("document.querySelector('#source').scrollTop = 35 * 20")
    page.frame()
    left, top, _, _ = page.box("#trace .row[data-i='4']")
    page.hover_at(left + 150, top + 10)
    near = texts(page, "#trace .row.near")  # equal blocks stand twice: by themselves, and in the program
    assert near and len({re.search(r"\w+\.py:\d+", row)[0] for row in near}) == 1 and texts(page, "#source .row.near")


def test_searching_filters(page):
    tab(page, "program")
    stage(page, "captured")
    total = page.js("document.querySelector('#trace').closest('.pane').querySelector('.count').textContent")
    search(page, "blocks.7.mlp")
    shown = page.js("document.querySelector('#trace').closest('.pane').querySelector('.count').textContent")
    assert total.endswith(" lines") and " of " in shown
    assert all("blocks.7.mlp" in t or "blocks_7_mlp" in t for t in texts(page, "#trace .row"))
    tab(page, "profile")
    found = texts(page, "#profile .row")
    assert len(found) > 5 and sum("blocks.7.mlp" in t for t in found) > len(found) / 2  # regions may begin elsewhere
    page.key("Escape")
    assert len(texts(page, "#profile .row")) > len(found)
    search(page, "no such thing anywhere")
    assert texts(page, "#profile .row") == []


def test_two_stages_are_compared_side_by_side(page):
    tab(page, "compare")
    assert texts(page, "#differences .removed") and texts(page, "#differences .added")
    assert any("layer_norm" in t for t in texts(page, "#differences .removed"))
    assert any("tile.region" in t for t in texts(page, "#differences .added"))
    page.choose("#after", 0)
    assert texts(page, "#differences .removed") == [] and "0 differences" in texts(page, "#view-compare .count")[0]
    assert any("equal lines" in t for t in texts(page, "#differences .fold"))
    page.click("#differences .fold")
    assert texts(page, "#differences .fold") == []


def test_alignment_keeps_every_line_once_and_in_order(page):
    tab(page, "compare")
    page.js("[...document.querySelectorAll('#view-compare .segments button')][1].click()")
    page.frame()
    left, right = [], []
    for at in range(0, page.js("document.querySelector('#differences .rows').clientHeight"), 600):
        page.js(f"document.querySelector('#differences').scrollTop = {at}")
        page.frame()
        rows = page.js(NUMBERS)
        left += [(i, a) for i, a, _ in rows if a]
        right += [(i, b) for i, _, b in rows if b]
    for side in (left, right):
        numbers = [n for _, n in sorted(set(side))]
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 50


def test_a_place_of_another_graph_is_found_there(browser, tmp_path):
    def first(x):
        return x.sin() + 1

    def second(x):
        return x.cos() * 2

    torch._dynamo.reset()
    states = []
    for f in (first, second):
        fast = tessera.jit(f, executors=["aten"])
        fast(torch.ones(3))
        states.append(compiled_state(fast))
    write(tmp_path / "two.html", states, None, "two")
    browser.open(tmp_path / "two.html", "program")
    line = second.__code__.co_firstlineno
    browser.js(f"document.querySelector('#source').scrollTop = {20 * (line - 5)}")
    browser.frame()
    browser.click(f"#source .row[data-i='{line}'] .text")
    assert any("aten.cos" in t for t in texts(browser, "#trace .row.pinned"))
    assert browser.errors == []


def test_dark_follows_the_system_and_the_button(page, path):
    def ground() -> str:
        return page.js("getComputedStyle(document.body).backgroundColor")

    light = ground()
    page.click("#theme")
    dark = ground()
    assert light != dark
    page.dark(True)
    page.open(path)
    assert ground() == dark
    page.click("#theme")
    assert ground() == light


def test_the_keyboard_is_enough(page):
    page.js("document.querySelector('#tab-overview').focus()")
    page.key("ArrowRight")
    assert page.js("location.hash") == "#program"
    page.js("document.querySelector('#trace').focus()")
    for _ in range(3):
        page.key("ArrowDown")
    page.key("Enter")
    assert len(texts(page, "#trace .row.pinned")) == 1 and page.js("!document.querySelector('#inspector').hidden")
    page.key("Escape")
    assert page.js("document.querySelector('#inspector').hidden")
    page.key("/")
    assert page.js("document.activeElement.id") == "search"


def test_a_chart_leads_to_its_equation(page):
    tab(page, "roofline")
    tab(page, "memory")
    left, top, width, height = page.box("#view-memory canvas")
    page.click_at(left + width / 2, top + height - 60)
    assert page.js("!document.querySelector('#inspector').hidden")
    page.js(
        "[...document.querySelectorAll('#inspector button')].find((b) => b.textContent === 'Show in program').click()"
    )
    page.frame()
    assert page.js("location.hash") == "#program" and len(texts(page, "#trace .row.pinned")) == 1


def test_a_cell_of_a_notebook_shows_the_page(browser, path):
    """In a frame, whatever the notebook is encoded in. Here it has rights that it has in no notebook, to be read."""
    cell = path.with_name("cell.html")
    inside = Report("a model", path.read_text(encoding="utf-8"))._repr_html_()
    cell.write_text(inside.replace('"allow-scripts"', '"allow-scripts allow-same-origin"'), encoding="utf-8")
    browser.errors.clear()
    browser.send("Page.navigate", url=cell.as_uri())
    frame = "document.querySelector('iframe')?.contentDocument"
    browser.wait(f"{frame}?.documentElement?.dataset.ready === 'yes'")
    browser.js(f"{frame}.getElementById('tab-profile').click()")
    assert browser.js(f"!{frame}.getElementById('view-profile').hidden")
    assert browser.errors == []
