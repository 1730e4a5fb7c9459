"""Files import each other in one direction, and say so at their top."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tessera

PACKAGE = Path(tessera.__file__).parent
# PyTorch's own parts that take seconds to import, where one command or executor wants them.
LATE = ("tessera.torch_internals",)


def module_of(path: Path) -> str:
    parts = ("tessera", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


@dataclass(frozen=True)
class Import:
    """An import of our own files, and whether it stands inside a function."""

    node: ast.ImportFrom
    inside: bool


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """All of a file; not those that only a type checker sees."""
    found: list[Import] = []
    left: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), False)]
    while left:
        node, inside = left.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tessera"):
            found.append(Import(node, inside))
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        left += [(child, inside) for child in ast.iter_child_nodes(node) if isinstance(child, STATEMENTS)]
    return tuple(found)


# An import is a statement: no expression holds one.
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def imported(node: ast.ImportFrom) -> set[str]:
    names = {f"{node.module}.{alias.name}" for alias in node.names}
    return {name if name in FILES else str(node.module) for name in names}


def test_no_circles() -> None:
    graph = {name: {of for found in imports(path) for of in imported(found.node)} for name, path in FILES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"files that import each other: {' -> '.join(error.args[1])}")


def test_imports_stand_at_the_top() -> None:
    inside = [
        f"{name}:{found.node.lineno}"
        for name, path in FILES.items() for found in imports(path)
        if found.inside and not str(found.node.module).startswith(LATE)
    ]  # fmt: skip
    assert not inside, f"imports of our own inside a function: {inside}"


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Folders of tests stand on the path side by side: of two modules of one name, whoever asks gets either."""
    tests = Path(__file__).parent
    folders = [
        folder for folder in (tests, *tests.iterdir()) if folder.is_dir() and not (folder / "__init__.py").exists()
    ]
    names = [path.name for folder in folders for path in folder.glob("*.py") if path.name != "conftest.py"]
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == []


def test_files_are_small() -> None:
    """Past 500 lines a file has a seam."""
    long = {name: n for name, path in FILES.items() if (n := path.read_text().count("\n")) > 500}
    assert not long
