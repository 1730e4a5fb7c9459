"""Files import each other in one direction, and say so at their top."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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


def imports(node: ast.AST) -> Iterator[ast.ImportFrom]:
    """Imports of our own files; not those that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("tessera"):
            yield child
        yield from imports(child)


def imported(node: ast.ImportFrom) -> set[str]:
    names = {f"{node.module}.{alias.name}" for alias in node.names}
    return {name if name in FILES else str(node.module) for name in names}


def test_no_circles() -> None:
    trees = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
    graph = {name: {of for node in imports(tree) for of in imported(node)} for name, tree in trees.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"files that import each other: {' -> '.join(error.args[1])}")


def test_imports_stand_at_the_top() -> None:
    inside = []
    for name, path in FILES.items():
        tree = ast.parse(path.read_text())
        for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)):
            inside += [f"{name}:{n.lineno}" for n in imports(function) if not str(n.module).startswith(LATE)]
    assert not inside, f"imports of our own inside a function: {inside}"


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Folders of tests stand on the path side by side: of two modules of one name, whoever asks gets either."""
    tests = Path(__file__).parent
    folders = [
        folder for folder in (tests, *tests.iterdir()) if folder.is_dir() and not (folder / "__init__.py").exists()
    ]
    names = [path.name for folder in folders for path in folder.glob("*.py") if path.name != "conftest.py"]
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == []
