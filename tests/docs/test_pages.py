"""Every page is true: its code runs and prints what it says, its links lead somewhere, the site builds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, apart, blocks, pinned, run_blocks

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# What a page's code imports that is not installed everywhere.
NEEDS = {"onnx": "onnx", "serve": "transformers", "stablehlo": "jax"}
WITH_CODE = [page for page in PAGES if blocks(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_code_runs(page: Path, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(page.stem, "torch"))
    apart(tmp_path, run_blocks, blocks(page.read_text()), str(tmp_path / f"{page.stem}.py"))


def test_blocks_are_found() -> None:
    text = "# A\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n<!-- not run: a GPU -->\n```python\nno\n```\n"
    (block,) = blocks(text)
    assert (block.line, block.code, block.printed) == (4, "print(1)\n", "1\n")


@pytest.mark.skipif(not pinned(), reason="printed programs are those of another PyTorch")
def test_what_a_page_prints_is_compared(tmp_path: Path) -> None:
    found = blocks("```python\nprint('a', 2)\n```\n```text\na ...\n```\n")
    run_blocks(found, str(tmp_path / "page.py"))
    with pytest.raises(AssertionError, match="line 2: the page says"):
        run_blocks(blocks("```python\nprint(1)\n```\n```text\n2\n```\n"), str(tmp_path / "page.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.is_file(), f"{page.name}: no file {name}"
        assert not anchor or anchor in anchors(file.read_text()), f"{page.name}: no heading for {target}"


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["README.md", "docs/comparison.md"])
def test_numbers_are_those_measured(name: str) -> None:
    """What a page says about speed stands in docs/performance.md, word for word."""
    measured = (ROOT / "docs" / "performance.md").read_text()
    prose = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.S)
    numbers = re.findall(r"(?<![\d.-])\d+\.\d+(?: (?:s|ms|µs)\b)?", prose)
    assert numbers and not [n for n in numbers if n not in measured]


def test_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="pip install -e '.[docs]' brings the site's tools")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in site.glob("*.html"):  # nothing is fetched to read it
        assert not re.search(r"<(script|link|img)[^>]*(src|href)=.?https?://", page.read_text()), page.name
