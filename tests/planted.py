"""Passes of a test's own in the pipelines, for as long as the test runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tessera.pipeline.lists import PIPELINES, insert
from tessera.pipeline.stage import Stage


def own_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is done to the pipelines is undone."""
    for kind, rows in list(PIPELINES.items()):
        monkeypatch.setitem(PIPELINES, kind, list(rows))


def plant(monkeypatch: pytest.MonkeyPatch, apply: Callable, before: str = "dce", over: str = "") -> None:
    own_pipelines(monkeypatch)
    insert(Stage("planted", apply, "a test's", over), before)
