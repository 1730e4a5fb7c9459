"""The engine can be read in an afternoon: docs/serve.md says which files each part is, and six of them stay short."""

from __future__ import annotations

import re
from pathlib import Path

import tessera

SERVE = Path(tessera.__file__).parent / "serve"
GUIDE = Path(__file__).parent.parent.parent / "docs" / "serve.md"
SIX = ("engine", "scheduler", "cache", "runner", "sampling", "server")
TOGETHER, EACH = 3500, 400  # lines


def parts() -> dict[str, list[str]]:
    """Files by part, as the guide lists them."""
    table = GUIDE.read_text().partition("## Where what is")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| (`.*`) \|$", table, re.MULTILINE)
    return {part: re.findall(r"`([^`]+)`", files) for part, files in rows}


def lines(name: str) -> int:
    return len((SERVE / name).read_text().splitlines())


def test_every_file_is_of_one_part() -> None:
    listed = [name for files in parts().values() for name in files]
    there = [str(path.relative_to(SERVE)) for path in SERVE.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(listed) == sorted(there)


def test_six_parts_are_an_afternoon() -> None:
    counted = {part: sum(map(lines, parts()[part])) for part in SIX}
    assert sum(counted.values()) <= TOGETHER, counted


def test_no_file_is_long() -> None:
    assert {name: lines(name) for files in parts().values() for name in files if lines(name) > EACH} == {}
