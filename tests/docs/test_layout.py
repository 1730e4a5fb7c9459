"""docs/layout.md is true, and so is every path that a page or a docstring names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import pytest
import torch
from pages import PAGES, ROOT

import tessera
from tessera.executors.base import in_order
from tessera.executors.default import WITH_KERNELS
from tessera.pipeline.lists import PIPELINES
from tessera.pipeline.stage import expanded

LAYOUT = (ROOT / "docs" / "layout.md").read_text()
# A path in prose or code: folders and a file, or a folder of this repository.
PATH = re.compile(r"(?<![\w/.*~<-])(?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|md|json)|`(?:tessera|tests|docs|examples)/[\w/]*`")
SOURCES = [*PAGES, *sorted((ROOT / "tessera").rglob("*.py"))]


def rows(first: str) -> Iterator[list[str]]:
    """The rows of the tables of layout.md whose first column is called so."""
    for table in re.findall(rf"^\| {first} \|.*\n\| ---.*\n((?:\|.*\n)+)", LAYOUT, re.M):
        for line in table.splitlines():
            yield [cell.strip().strip("`") for cell in line.strip("|").split("|")]


def endings() -> set[str]:
    """Every file and folder of the repository, as a path from any folder above it."""
    found = set()
    for top in ("tessera", "tests", "docs", "examples"):
        for path in (ROOT / top, *(ROOT / top).rglob("*")):
            parts = path.relative_to(ROOT).parts
            found.update("/".join(parts[i:]) for i in range(len(parts)))
    return found


def test_every_path_exists() -> None:
    there, missing = endings(), []
    for source in SOURCES:
        for number, line in enumerate(source.read_text().splitlines(), 1):
            named = (path.strip("`").rstrip("/") for path in PATH.findall(line))
            missing += [f"{source.relative_to(ROOT)}:{number}: {path}" for path in named if path not in there]
    assert not missing, "\n".join(missing)


def test_every_folder_has_a_row() -> None:
    folders = {f"tessera/{path.parent.name}/" for path in (ROOT / "tessera").glob("*/__init__.py")}
    assert folders <= {row[0] for row in rows("folder")}


def test_stages_are_those_of_the_pipeline() -> None:
    titles = [stage.title for stage in expanded(PIPELINES["training"], in_order(WITH_KERNELS))]
    assert [row[0] for row in rows("stage")] == ["captured", *titles]


def test_stages_stand_in_their_order() -> None:
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU())
    fast = tessera.jit(model, executors=["sdpa", "tile", "aten"])
    fast(torch.randn(4, 8)).square().mean().backward()
    printed = [stage.name for stage in tessera.stages(fast)]
    assert [name for name, *_ in rows("stage") if name in printed] == printed


def test_the_direction_of_imports_is_the_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [re.sub(r"[()]", "", layer) for layer in contracts[0]["layers"]]
    (listed,) = re.findall(r"```text\n(tools\n.*?)```", LAYOUT, re.S)
    assert listed.splitlines() == layers


@pytest.mark.parametrize("text", ["see `tile/passes/online.py`", "`tessera/nowhere/` holds it"])
def test_a_wrong_path_is_seen(text: str) -> None:
    (path,) = PATH.findall(text)
    assert path.strip("`").rstrip("/") not in endings()
