"""The generated pages are those the code gives now, and every public name is on them."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import tessera
from tessera.tools.reference import DOCS, PAGES, comments, groups
from tessera.util.config import Config


@pytest.mark.parametrize("page", PAGES)
def test_page_is_true(page: str) -> None:
    assert (DOCS / page).read_text() == PAGES[page](), "write it again with: python -m tessera.tools.reference"


def test_every_public_name_is_there_once() -> None:
    shown = [name for names in groups().values() for name in names]
    assert sorted(shown) == sorted(name for name in tessera.__all__ if not name.startswith("__"))
    text = (DOCS / "reference.md").read_text()
    assert all(f"### `tessera.{name}`" in text for name in shown)


def test_every_public_name_has_a_docstring() -> None:
    missing = [name for names in groups().values() for name in names if not inspect.getdoc(getattr(tessera, name))]
    assert not missing


def test_every_flag_says_what_it_does() -> None:
    assert all(comments()[field.name] for field in dataclasses.fields(Config))
