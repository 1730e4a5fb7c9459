"""Solvers that are not there, or do not load: what is said of them. Those that are there load beside each other."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tessera.spatial import solvers
from tessera.spatial.solvers import missing, solver
from tessera.util.errors import OptionError


def without(name: str) -> str:
    """What `solvers._found` gives where nothing is installed."""
    what, _ = solvers.SOLVERS[name]
    return f"{what} is part of {name}, which is not installed: {solvers.INSTALL}"


def test_one_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(solvers.SOLVERS, "no_such_solver", ("Nothing", "no_such_solver"))
    assert missing("no_such_solver") == without("no_such_solver")
    with pytest.raises(OptionError, match=r"no_such_solver, which is not installed: pip install tessera\[plan\]"):
        solver("no_such_solver")


def test_one_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_solver.py").write_text('raise ImportError("undefined symbol: Highs")\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(solvers.SOLVERS, "broken_solver", ("Nothing", "broken_solver"))
    with pytest.raises(OptionError, match="installed but cannot be loaded .undefined symbol: Highs.; try pip install"):
        solver("broken_solver")


def test_both_load_in_one_process() -> None:
    if not all(importlib.util.find_spec(name) for name in solvers.SOLVERS):
        pytest.skip("the extra plan is not installed")
    assert [missing(name) for name in solvers.SOLVERS] == ["", ""]
